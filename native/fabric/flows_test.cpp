// Tests of Flows: rates and end times equal values computed by hand. After each step the rates equal those of a new
// solver for the remaining flows.
#include "fabric/flows.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/testing/check.hpp"
#include "base/testing/one_thread.hpp"

namespace {

using ff::fabric::Flows;
constexpr double kNever = std::numeric_limits<double>::infinity();

struct Scene {
  std::vector<double> capacities;
  std::vector<std::int64_t> begin{0};
  std::vector<std::int32_t> links;
  std::vector<double> bytes;

  explicit Scene(std::vector<double> capacity) : capacities(std::move(capacity)) {}
  void add(std::vector<std::int32_t> path, double size) {
    links.insert(links.end(), path.begin(), path.end());
    begin.push_back(static_cast<std::int64_t>(links.size()));
    bytes.push_back(size);
  }
  Flows flows() const { return Flows(capacities, begin, links, bytes); }
};

bool near(double a, double b, double relative = 1e-9) {
  return a == b || std::abs(a - b) <= relative * std::max(std::abs(a), std::abs(b));
}

void parking_lot() {
  Scene scene({1, 1, 1});
  scene.add({0, 1, 2}, 1);
  for (std::int32_t link = 0; link < 3; ++link) scene.add({link}, 1);
  Flows flows = scene.flows();
  for (const double rate : flows.rates()) CHECK(near(rate, 0.5));
  flows.run(kNever, 0);
  for (const double end : flows.ends()) CHECK(near(end, 2));
}

// The short flow ends at time 2. The long flow then has 3 bytes left, and the whole link.
void second_flow_gets_the_link() {
  Scene scene(std::vector<double>{1});
  scene.add({0}, 1);
  scene.add({0}, 4);
  Flows flows = scene.flows();
  flows.run(1.5, 0);
  CHECK(near(flows.now(), 1.5) && near(flows.left()[0], 0.25) && near(flows.left()[1], 3.25));
  flows.run(kNever, 0);
  CHECK(near(flows.ends()[0], 2) && near(flows.ends()[1], 5));
}

void a_dead_link_holds_its_flows() {
  Scene scene({0, 1});
  scene.add({0, 1}, 1);
  scene.add({1}, 1);
  scene.add({1}, 0);  // nothing to carry: ends at once
  Flows flows = scene.flows();
  flows.run(kNever, 0);
  CHECK(flows.ends()[0] == kNever && flows.rates()[0] == 0 && near(flows.left()[0], 1));
  CHECK(near(flows.ends()[1], 1) && flows.ends()[2] == 0);
}

void bad_arguments() {
  const std::vector<double> one{1};
  const std::vector<std::int64_t> begin{0, 1};
  const auto refused = [](auto make) {
    try {
      make();
      return false;
    } catch (const ff::Error& error) {
      return error.code() == ff::Code::invalid;
    }
  };
  CHECK(refused([&] { Flows(one, begin, std::vector<std::int32_t>{1}, one); }));
  CHECK(refused([&] { Flows(one, begin, std::vector<std::int32_t>{-1}, one); }));
  CHECK(refused([&] { Flows(one, std::vector<std::int64_t>{0, 0}, {}, one); }));
  CHECK(refused([&] { Flows(one, std::vector<std::int64_t>{0, 2}, std::vector<std::int32_t>{0, 0}, one); }));
  CHECK(refused([&] { Flows(one, begin, std::vector<std::int32_t>{0}, std::vector<double>{-1}); }));
  CHECK(refused([&] { Flows(std::vector<double>{NAN}, begin, std::vector<std::int32_t>{0}, one); }));
}

// A solver that continues step by step gives the same rates as a new solver for the remaining flows.
void steps_equal_new_solvers(unsigned seed) {
  std::mt19937 random(seed);
  Scene scene({});
  const int links = 2 + static_cast<int>(random() % 10), count = 1 + static_cast<int>(random() % 40);
  for (int link = 0; link < links; ++link) scene.capacities.push_back(1.0 + static_cast<int>(random() % 4));
  for (int flow = 0; flow < count; ++flow) {
    std::vector<std::int32_t> path;
    for (int link = 0; link < links; ++link)
      if (random() % 3 == 0) path.push_back(link);
    if (path.empty()) path.push_back(static_cast<int>(random() % static_cast<unsigned>(links)));
    scene.add(path, 1.0 + static_cast<int>(random() % 5));
  }
  Flows flows = scene.flows();
  for (double until = 0.5; until < 60; until += 0.5) {
    flows.run(until, 0);
    Scene rest(scene.capacities);
    std::vector<int> names;
    const std::vector<double> left = flows.left();
    for (int flow = 0; flow < count; ++flow) {
      if (flows.ends()[flow] != kNever) continue;
      rest.add({scene.links.begin() + scene.begin[flow], scene.links.begin() + scene.begin[flow + 1]}, left[flow]);
      names.push_back(flow);
    }
    const Flows anew = rest.flows();
    for (std::size_t place = 0; place < names.size(); ++place)
      CHECK(near(anew.rates()[place], flows.rates()[names[place]]));
  }
  flows.run(kNever, 0);
  for (const double end : flows.ends()) CHECK(end != kNever);
}

// With merge = 0.01 the end times differ from the exact ones by at most 5 %, because errors of several events add up.
void merged_ends_are_near(unsigned seed) {
  std::mt19937 random(seed);
  Scene scene(std::vector<double>(20, 1.0));
  for (int flow = 0; flow < 200; ++flow) {
    const auto one = static_cast<std::int32_t>(random() % 10), other = static_cast<std::int32_t>(10 + random() % 10);
    scene.add({one, other}, 1.0 + static_cast<int>(random() % 1000) / 1000.0);
  }
  Flows exact = scene.flows(), merged = scene.flows();
  exact.run(kNever, 0);
  merged.run(kNever, 0.01);
  CHECK(merged.events() < exact.events());
  for (std::size_t flow = 0; flow < 200; ++flow) CHECK(near(exact.ends()[flow], merged.ends()[flow], 0.05));
}

}  // namespace

int main() {
  parking_lot();
  second_flow_gets_the_link();
  a_dead_link_holds_its_flows();
  bad_arguments();
  for (unsigned seed = 0; seed < 200; ++seed) steps_equal_new_solvers(seed);
  for (unsigned seed = 0; seed < 5; ++seed) merged_ends_are_near(seed);
}
