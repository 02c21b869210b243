// RMS norm of rows with PyTorch's bits. Included by kernels.inl.
#pragma once

#include "nn/rows.inl"

namespace ff::nn {
namespace {

// The sum of a row in the order of PyTorch 2's reduction over the last dimension. A group is four vectors of 32 bytes,
// added side by side. After every 2^power_ groups the partial sums are carried to the next of four levels.
template <class S>
class RowSum {
 public:
  static constexpr std::size_t kLane = 32 / sizeof(S), kGroup = 4 * kLane, kGroups = 16;
  static constexpr std::size_t kTerms = kGroup * kGroups;  // maximum number of terms in one call of `add`

  explicit RowSum(std::size_t width) : groups_(width / kGroup) {
    std::size_t bits = 0;
    while (bits < 60 && (std::size_t{1} << bits) < groups_) ++bits;
    power_ = bits / kLevels < 4 ? 4 : bits / kLevels;
  }

  // Adds the next `count` terms: kTerms, or fewer at the end of the row.
  void add(const S* terms, std::size_t count) {
    const std::size_t groups = count / kGroup;
    for (std::size_t group = 0; group < groups; ++group) {
      for (std::size_t j = 0; j < kParts; ++j) {
        sums_[0][j] += simd::load<Part>(terms + group * kGroup + j * kPart);
      }
    }
    done_ += groups;
    if (groups == kGroups && done_ % (std::size_t{1} << power_) == 0) carry();
    rest_ = terms + groups * kGroup;
    left_ = count % kGroup;
  }

  // Returns the sum. REQUIRES: the terms of the last `add` are still in memory.
  S total() const {
    S part[4][kLane];
    Part whole[kParts];
    for (std::size_t j = 0; j < kParts; ++j) {
      whole[j] = sums_[0][j];
      for (std::size_t level = 1; level < kLevels; ++level) whole[j] += sums_[level][j];
    }
    std::memcpy(part, whole, sizeof part);
    if (groups_ == 0 && left_ < kLane) return narrow();
    const std::size_t vectors = left_ / kLane;
    for (std::size_t v = 0; v < vectors; ++v) {
      for (std::size_t lane = 0; lane < kLane; ++lane) part[0][lane] += rest_[v * kLane + lane];
    }
    S sum = 0;
    for (std::size_t i = vectors * kLane; i < left_; ++i) sum += rest_[i];
    for (std::size_t lane = 0; lane < kLane; ++lane) {
      sum += part[0][lane] + part[1][lane] + part[2][lane] + part[3][lane];
    }
    return sum;
  }

 private:
  using Part = simd::Vector<S>;
  static constexpr std::size_t kPart = sizeof(Part) / sizeof(S), kParts = kGroup / kPart, kLevels = 4;

  void carry() {
    const std::size_t mask = (std::size_t{1} << power_) - 1;
    for (std::size_t level = 1; level < kLevels; ++level) {
      for (std::size_t j = 0; j < kParts; ++j) {
        sums_[level][j] += sums_[level - 1][j];
        sums_[level - 1][j] = Part{};
      }
      if ((done_ & mask << level * power_) != 0) break;
    }
  }

  // Sums a row shorter than a vector, four elements side by side.
  S narrow() const {
    S part[4] = {};
    std::size_t i = 0;
    for (; i + 4 <= left_; i += 4) {
      for (std::size_t k = 0; k < 4; ++k) part[k] += rest_[i + k];
    }
    for (; i < left_; ++i) part[0] += rest_[i];
    return part[0] + part[1] + part[2] + part[3];
  }

  std::size_t groups_, power_, done_ = 0, left_ = 0;
  const S* rest_ = nullptr;
  Part sums_[kLevels][kParts] = {};
};

// Calls each(i, n, term) for every step of a row; `each` sets `term` from element i on, where at least n elements are
// left. Returns the sum of all terms.
template <class T, class Each>
inline __attribute__((always_inline)) typename T::Scalar sum_of(std::size_t width, Each each) {
  using S = typename T::Scalar;
  using Sum = RowSum<S>;
  Sum sum(width);
  alignas(64) S terms[Sum::kTerms + T::step];
  for (std::size_t begin = 0; begin < width; begin += Sum::kTerms) {
    const std::size_t count = width - begin < Sum::kTerms ? width - begin : Sum::kTerms;
    for (std::size_t i = 0; i < count; i += T::step) {
      typename T::Vec term[kVectors];
      each(begin + i, count - i, term);
      std::memcpy(terms + i, term, sizeof term);
    }
    sum.add(terms, count);
  }
  return sum.total();
}

inline float root(float v) { return __builtin_sqrtf(v); }
inline double root(double v) { return __builtin_sqrt(v); }

template <class T>
void rms_norm(const NormForward& of, std::size_t rows, std::size_t width, double eps) {
  using S = typename T::Scalar;
  using Vec = typename T::Vec;
  const std::size_t bytes = width * T::size;
  const auto *x = static_cast<const char*>(of.x), *other = static_cast<const char*>(of.residual);
  const auto* const weight = static_cast<const char*>(of.weight);
  auto *h = static_cast<char*>(of.h), *y = static_cast<char*>(of.y);
  for (std::size_t row = 0; row < rows; ++row, x += bytes, y += bytes) {
    const S sum = sum_of<T>(width, [&](std::size_t i, std::size_t n, Vec(&v)[kVectors]) {
      read<T>(x + i * T::size, n, v);
      if (other != nullptr) {
        Vec b[kVectors];
        read<T>(other + i * T::size, n, b);
        for (std::size_t j = 0; j < kVectors; ++j) v[j] += b[j];
        write<T>(h + i * T::size, n, v);
        settle<T>(v);
      }
      for (auto& part : v) part *= part;
    });
    const S scale = S{1} / root(sum / static_cast<S>(width) + static_cast<S>(eps));
    static_cast<S*>(of.scales)[row] = scale;
    const char* const from = other != nullptr ? h : x;
    for (std::size_t i = 0; i < width; i += T::step) {
      Vec v[kVectors], w[kVectors];
      read<T>(from + i * T::size, width - i, v);
      for (auto& part : v) part *= scale;
      if (weight != nullptr) {
        read<T>(weight + i * T::size, width - i, w);
        for (std::size_t j = 0; j < kVectors; ++j) v[j] *= w[j];
      }
      write<T>(y + i * T::size, width - i, v);
    }
    if (other != nullptr) other += bytes, h += bytes;
  }
}

// The formulas of PyTorch's autograd for x * rsqrt(mean(x^2) + eps) * weight, in its order of summands.
template <class T>
void rms_norm_backward(const NormBackward& of, std::size_t rows, std::size_t width) {
  using S = typename T::Scalar;
  using Vec = typename T::Vec;
  const std::size_t bytes = width * T::size;
  const auto *h = static_cast<const char*>(of.h), *g = static_cast<const char*>(of.g),
             *gh = static_cast<const char*>(of.gh);
  const auto* const weight = static_cast<const char*>(of.weight);
  auto *dh = static_cast<char*>(of.dh), *apart = static_cast<char*>(of.apart);
  auto* products = static_cast<S*>(of.products);
  for (std::size_t row = 0; row < rows; ++row, h += bytes, g += bytes, dh += bytes) {
    const S scale = static_cast<const S*>(of.scales)[row];
    const auto scaled = [&](std::size_t i, std::size_t n, Vec(&v)[kVectors]) {
      read<T>(g + i * T::size, n, v);
      if (weight == nullptr) return;
      Vec w[kVectors];
      read<T>(weight + i * T::size, n, w);
      for (std::size_t j = 0; j < kVectors; ++j) v[j] *= w[j];
    };
    const S sum = sum_of<T>(width, [&](std::size_t i, std::size_t n, Vec(&v)[kVectors]) {
      Vec block[kVectors], part[kVectors];
      read<T>(h + i * T::size, n, block);
      scaled(i, n, v);
      if (products != nullptr) {
        read<T>(g + i * T::size, n, part);
        for (std::size_t j = 0; j < kVectors; ++j) part[j] *= block[j] * scale;
        std::memcpy(products + i, part, (n < T::step ? n : T::step) * sizeof(S));
      }
      for (std::size_t j = 0; j < kVectors; ++j) v[j] *= block[j];
    });
    const S cubed = scale * scale * scale;
    const S squares = sum * S{-0.5} * cubed / static_cast<S>(width);
    for (std::size_t i = 0; i < width; i += T::step) {
      Vec block[kVectors], through[kVectors], more[kVectors];
      read<T>(h + i * T::size, width - i, block);
      scaled(i, width - i, through);
      for (std::size_t j = 0; j < kVectors; ++j) {
        through[j] *= scale;
        block[j] = block[j] * S{2} * squares;
      }
      if (gh != nullptr) read<T>(gh + i * T::size, width - i, more);
      if (apart != nullptr) {
        write<T>(dh + i * T::size, width - i, through);
        write<T>(apart + i * T::size, width - i, block);
        continue;
      }
      if (gh != nullptr && T::size == sizeof(S)) {
        for (std::size_t j = 0; j < kVectors; ++j) through[j] += more[j];
      }
      for (std::size_t j = 0; j < kVectors; ++j) through[j] += block[j];
      if (gh != nullptr && T::size != sizeof(S)) {
        settle<T>(through);
        for (std::size_t j = 0; j < kVectors; ++j) through[j] += more[j];
      }
      write<T>(dh + i * T::size, width - i, through);
    }
    if (gh != nullptr) gh += bytes;
    if (apart != nullptr) apart += bytes;
    if (products != nullptr) products += width;
  }
}

}  // namespace
}  // namespace ff::nn
