// Masses of scores at a temperature, and the temperature at which as many as are wanted have a share of it.
#pragma once

#include <cmath>

namespace freekv::detail {

/// Softmax masses of scores that descend, at a temperature.
struct descending_masses {
  const float* scores = nullptr;
  int count = 0;
  double temperature = 1.0, sum = 0.0;

  descending_masses(const float* descending, int n, double t) : scores(descending), count(n), temperature(t) {
    for (int i = 0; i < count; ++i) sum += weight(i);
  }
  double weight(int i) const { return weight_of(scores[i]); }
  double weight_of(float score) const {
    return std::exp((static_cast<double>(score) - static_cast<double>(scores[0])) / temperature);
  }
  /// Share that the first `n` have together.
  double of_first(int n) const {
    double mass = 0.0;
    for (int i = 0; i < n; ++i) mass += weight(i);
    return mass / sum;
  }
  /// The fewest that have `p` together.
  int fewest(double p) const {
    double mass = 0.0;
    for (int i = 0; i < count; ++i)
      if ((mass += weight(i)) >= p * sum) return i + 1;
    return count;
  }
};

/// HARD-KV's calibration (arXiv 2606.28831, section 3 and appendix D): the temperature at which the
/// `wanted(row)` best of each row of transformed scores have a share of `p`, on average over the rows that
/// have scores, by bisection from 1e-3 to 10: that share falls as the temperature rises. Where more than are
/// wanted share the largest score it is the lowest. `row(r)` is a row's scores, descending, and `count(r)`
/// how many there are.
template <class Row, class Count, class Wanted>
double calibrated_temperature(int rows, double p, const Row& row, const Count& count, const Wanted& wanted) {
  const auto share = [&](double temperature) {
    double sum = 0.0;
    int with_scores = 0;
    for (int r = 0; r < rows; ++r) {
      if (count(r) == 0) continue;
      sum += descending_masses(row(r), count(r), temperature).of_first(wanted(r));
      ++with_scores;
    }
    return sum / with_scores;
  };
  double low = std::log(1e-3), high = std::log(10.0);
  for (int halvings = 0; halvings < 40; ++halvings) {
    const double middle = 0.5 * (low + high);
    (share(std::exp(middle)) >= p ? low : high) = middle;
  }
  return std::exp(low);
}

}  // namespace freekv::detail
