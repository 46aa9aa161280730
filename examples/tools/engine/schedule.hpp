// Requests that come to the engine, drawn from a seed.
#pragma once

#include <random>

namespace freekv::examples {

/// Numbers that every run draws alike.
class dice {
 public:
  explicit dice(unsigned seed) : engine_(seed) {}
  int below(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  int between(int low, int high) { return low + below(high - low + 1); }

 private:
  std::mt19937 engine_;
};

struct request {
  std::int64_t arrives = 0;    // at this replay
  int prompt = 0, output = 0;  // tokens
  bool forks = false;          // is answered twice, from one prompt
  int takes_back = 0;          // tokens that its user takes back, halfway
};

/// An endless list of requests: a batch's worth of them, some at once, and now and then a lull in which it
/// empties.
class arrivals {
 public:
  arrivals(unsigned seed, const engine_options& o) : random_(seed), options_(o) { draw(); }
  const request& next() const { return next_; }
  void draw() {
    const int gap =
        options_.output * 5 / 8 / options_.batch + 1;  // in which a batch of mean requests ends one
    next_.arrives += random_.below(3) == 0 ? 0 : random_.below(3 * gap);
    if (random_.below(20) == 0) next_.arrives += 2 * options_.output;
    next_.prompt = random_.between(options_.prompt / 4 + 1, options_.prompt);
    next_.output = random_.between(options_.output / 4 + 1, options_.output);
    next_.forks = random_.below(6) == 0;
    next_.takes_back = random_.below(3) == 0 ? random_.between(1, next_.output / 4 + 1) : 0;
  }

 private:
  dice random_;
  engine_options options_;
  request next_;
};

}  // namespace freekv::examples
