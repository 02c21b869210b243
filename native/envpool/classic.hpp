// The classic control tasks as gymnasium defines them (its envs/classic_control, version 1), step for step.
//
// A task has a state of kState doubles. reset() draws one, step() replaces it and returns whether the episode has
// terminated, observe() writes what an agent sees. Actions are doubles: a number from 0 to kActions - 1, or any value
// where kActions is 0.
#pragma once

#include <algorithm>
#include <cmath>
#include <numbers>

#include "envpool/random.hpp"

namespace ff::envpool {

struct CartPole {
  static constexpr int kState = 4, kObservation = 4, kActions = 2, kLimit = 500;

  static void reset(Random& random, double* s) {
    for (int i = 0; i < kState; ++i) s[i] = random.uniform(-0.05, 0.05);
  }

  static bool step(double* s, double action, double& reward) {
    constexpr double kGravity = 9.8, kPole = 0.1, kMass = 1.0 + kPole, kLength = 0.5, kForce = 10.0, kTime = 0.02;
    constexpr double kPoleLength = kPole * kLength, kMostX = 2.4, kMostAngle = 12 * 2 * std::numbers::pi / 360;
    const double cosine = std::cos(s[2]), sine = std::sin(s[2]);
    const double force = action == 1 ? kForce : -kForce;
    const double push = (force + kPoleLength * (s[3] * s[3]) * sine) / kMass;
    const double turn = (kGravity * sine - cosine * push) / (kLength * (4.0 / 3.0 - kPole * (cosine * cosine) / kMass));
    const double speed_up = push - kPoleLength * turn * cosine / kMass;
    s[0] += kTime * s[1];
    s[1] += kTime * speed_up;
    s[2] += kTime * s[3];
    s[3] += kTime * turn;
    reward = 1.0;
    return std::abs(s[0]) > kMostX || std::abs(s[2]) > kMostAngle;
  }

  static void observe(const double* s, float* seen) {
    for (int i = 0; i < kState; ++i) seen[i] = static_cast<float>(s[i]);
  }
};

struct Pendulum {
  static constexpr int kState = 2, kObservation = 3, kActions = 0, kLimit = 200;

  static void reset(Random& random, double* s) {
    s[0] = random.uniform(-std::numbers::pi, std::numbers::pi);
    s[1] = random.uniform(-1.0, 1.0);
  }

  static bool step(double* s, double action, double& reward) {
    constexpr double kMostTorque = 2.0, kMostSpeed = 8.0, kTime = 0.05, kGravity = 10.0;
    const auto torque = static_cast<float>(std::clamp(action, -kMostTorque, kMostTorque));  // float32 in gymnasium
    const double angle = wrapped(s[0]);
    reward = -(angle * angle + 0.1 * (s[1] * s[1]) + static_cast<double>(0.001f * (torque * torque)));
    const double change = 3 * kGravity / 2 * std::sin(s[0]) + static_cast<double>(3.0f * torque);
    s[1] = std::clamp(s[1] + change * kTime, -kMostSpeed, kMostSpeed);
    s[0] += s[1] * kTime;
    return false;
  }

  static void observe(const double* s, float* seen) {
    seen[0] = static_cast<float>(std::cos(s[0]));
    seen[1] = static_cast<float>(std::sin(s[0]));
    seen[2] = static_cast<float>(s[1]);
  }

 private:
  static double wrapped(double angle) {  // returns the angle in [-pi, pi)
    constexpr double kTurn = 2 * std::numbers::pi;
    const double rest = std::fmod(angle + std::numbers::pi, kTurn);
    return (rest < 0 ? rest + kTurn : rest) - std::numbers::pi;
  }
};

struct MountainCar {
  static constexpr int kState = 2, kObservation = 2, kActions = 3, kLimit = 200;

  static void reset(Random& random, double* s) {
    s[0] = random.uniform(-0.6, -0.4);
    s[1] = 0;
  }

  static bool step(double* s, double action, double& reward) {
    constexpr double kForce = 0.001, kGravity = 0.0025, kMostSpeed = 0.07, kLeft = -1.2, kRight = 0.6, kGoal = 0.5;
    s[1] = std::clamp(s[1] + ((action - 1) * kForce + std::cos(3 * s[0]) * -kGravity), -kMostSpeed, kMostSpeed);
    s[0] = std::clamp(s[0] + s[1], kLeft, kRight);
    if (s[0] == kLeft && s[1] < 0) s[1] = 0;
    reward = -1.0;
    return s[0] >= kGoal && s[1] >= 0;
  }

  static void observe(const double* s, float* seen) {
    seen[0] = static_cast<float>(s[0]);
    seen[1] = static_cast<float>(s[1]);
  }
};

// Gymnasium keeps this task's state in single precision. Doubles hold such values exactly; each sum rounds to float.
struct MountainCarContinuous {
  static constexpr int kState = 2, kObservation = 2, kActions = 0, kLimit = 999;

  static void reset(Random& random, double* s) {
    s[0] = static_cast<double>(static_cast<float>(random.uniform(-0.6, -0.4)));
    s[1] = 0;
  }

  static bool step(double* s, double action, double& reward) {
    constexpr float kMostSpeed = 0.07f, kLeft = -1.2f, kRight = 0.6f;
    constexpr double kPower = 0.0015, kGoal = 0.45;
    const auto position = static_cast<float>(s[0]), speed = static_cast<float>(s[1]);
    const double slope = 0.0025 * std::cos(static_cast<double>(3 * position));
    // Gymnasium keeps a clipped force in double precision.
    const float change = std::abs(action) > 1
                             ? static_cast<float>(std::copysign(kPower, action) - slope)
                             : static_cast<float>(action) * static_cast<float>(kPower) - static_cast<float>(slope);
    float next = std::clamp(speed + change, -kMostSpeed, kMostSpeed);
    const float at = std::clamp(position + next, kLeft, kRight);
    if (at == kLeft && next < 0) next = 0;
    s[0] = static_cast<double>(at);
    s[1] = static_cast<double>(next);
    const bool there = s[0] >= kGoal && next >= 0;
    reward = (there ? 100.0 : 0.0) - action * action * 0.1;
    return there;
  }

  static void observe(const double* s, float* seen) { MountainCar::observe(s, seen); }
};

struct Acrobot {
  static constexpr int kState = 4, kObservation = 6, kActions = 3, kLimit = 500;

  static void reset(Random& random, double* s) {
    for (int i = 0; i < kState; ++i) s[i] = static_cast<double>(static_cast<float>(random.uniform(-0.1, 0.1)));
  }

  static bool step(double* s, double action, double& reward) {  // one fourth-order Runge-Kutta step
    constexpr double kTime = 0.2, kMost1 = 4 * std::numbers::pi, kMost2 = 9 * std::numbers::pi;
    const double torque = action - 1;
    double k1[kState], k2[kState], k3[kState], k4[kState], at[kState];
    slope(s, torque, k1);
    for (int i = 0; i < kState; ++i) at[i] = s[i] + kTime / 2 * k1[i];
    slope(at, torque, k2);
    for (int i = 0; i < kState; ++i) at[i] = s[i] + kTime / 2 * k2[i];
    slope(at, torque, k3);
    for (int i = 0; i < kState; ++i) at[i] = s[i] + kTime * k3[i];
    slope(at, torque, k4);
    for (int i = 0; i < kState; ++i) s[i] += kTime / 6 * (k1[i] + 2 * k2[i] + 2 * k3[i] + k4[i]);
    s[0] = wrapped(s[0]);
    s[1] = wrapped(s[1]);
    s[2] = std::clamp(s[2], -kMost1, kMost1);
    s[3] = std::clamp(s[3], -kMost2, kMost2);
    const bool up = -std::cos(s[0]) - std::cos(s[1] + s[0]) > 1.0;
    reward = up ? 0.0 : -1.0;
    return up;
  }

  static void observe(const double* s, float* seen) {
    seen[0] = static_cast<float>(std::cos(s[0]));
    seen[1] = static_cast<float>(std::sin(s[0]));
    seen[2] = static_cast<float>(std::cos(s[1]));
    seen[3] = static_cast<float>(std::sin(s[1]));
    seen[4] = static_cast<float>(s[2]);
    seen[5] = static_cast<float>(s[3]);
  }

 private:
  // Derivatives of both angles and speeds, by the equations of Sutton and Barto's book. Masses, lengths and moments of
  // inertia are 1, centres of mass lie in the middle.
  static void slope(const double* s, double torque, double* k) {
    constexpr double kCentre = 0.5, kGravity = 9.8, kHalfTurn = std::numbers::pi / 2;
    const double cosine = std::cos(s[1]), sine = std::sin(s[1]);
    const double d1 = kCentre * kCentre + (1 + kCentre * kCentre + 2 * kCentre * cosine) + 2;
    const double d2 = kCentre * kCentre + kCentre * cosine + 1;
    const double phi2 = kCentre * kGravity * std::cos(s[0] + s[1] - kHalfTurn);
    const double phi1 = -kCentre * (s[3] * s[3]) * sine - 2 * kCentre * s[3] * s[2] * sine +
                        (kCentre + 1) * kGravity * std::cos(s[0] - kHalfTurn) + phi2;
    const double second =
        (torque + d2 / d1 * phi1 - kCentre * (s[2] * s[2]) * sine - phi2) / (kCentre * kCentre + 1 - d2 * d2 / d1);
    k[0] = s[2];
    k[1] = s[3];
    k[2] = -(d2 * second + phi1) / d1;
    k[3] = second;
  }

  static double wrapped(double angle) { return std::remainder(angle, 2 * std::numbers::pi); }
};

}  // namespace ff::envpool
