// A decoder of random weights: what lies between the attention of its layers. Keys and values are bfloat16,
// as weights are; all else is float. Results of a row do not depend on the rows beside it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/cuda/runtime.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/core/element.hpp>
#include <freekv/core/size.hpp>
#include <memory>
#include <span>
#include <vector>

#include "engine.hpp"
#include "random_numbers.hpp"

namespace freekv::examples {

/// Numbers of the device, or page-locked.
template <class T, class Resource>
class array {
 public:
  explicit array(std::size_t n) : size_(n), data_(static_cast<T*>(from_.allocate(n * sizeof(T)))) {}
  array(const array&) = delete;
  array& operator=(const array&) = delete;
  ~array() { from_.deallocate(data_, size_ * sizeof(T)); }
  T* data() const { return data_; }
  std::size_t size() const { return size_; }

 private:
  Resource from_;
  std::size_t size_;
  T* data_;
};
template <class T>
using in_device = array<T, device::device_memory>;
template <class T>
using page_locked = array<T, device::pinned_memory>;

/// The angle of a pair of numbers of a key or query; in double precision, as an error of the power is
/// multiplied by the position.
FREEKV_HD inline float rope_angle(int position, int pair, const model_shape& model) {
  const double turns = static_cast<double>(-2 * pair) / model.head_dim;
  constexpr double whole_turn = 6.283185307179586;
  return static_cast<float>(fmod(position * pow(static_cast<double>(model.rope_base), turns), whole_turn));
}
namespace kernels {

static __global__ void fill_with_normals(bfloat16* to, std::size_t n, float scale, std::uint64_t seed) {
  for (std::size_t i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
    to[i] = from_float<bfloat16>(scale * random_normal(seed, i));
}

__device__ inline float sum_of_warp(float x) {
  for (int half = 16; half > 0; half /= 2) x += __shfl_xor_sync(0xffffffffu, x, half);
  return x;
}

/// Packets of rows, taken one a step; the counter is advanced at the end of a step.
struct packet_ring {
  const row_input* packets;  // (depth, rows), page-locked
  int depth, rows;
  std::int32_t* taken;
};

/// A row's token becomes numbers.
static __global__ void embed(packet_ring ring, const std::int32_t* chosen, row_input* inputs,
                             const bfloat16* embedding, int hidden, float* x) {
  const int row = static_cast<int>(blockIdx.x);
  row_input input = ring.packets[*ring.taken % ring.depth * ring.rows + row];
  if (input.token < 0) input.token = chosen[~input.token];
  if (threadIdx.x == 0) inputs[row] = input;
  for (int i = static_cast<int>(threadIdx.x); i < hidden; i += static_cast<int>(blockDim.x))
    x[row * hidden + i] = to_float(embedding[to_size(input.token) * hidden + i]);
}

/// RMSNorm of each row, with a gain of 1.
static __global__ void rms_norm(const float* x, int width, float* y) {
  __shared__ float of_warp[32];
  x += to_size(blockIdx.x) * width;
  y += to_size(blockIdx.x) * width;
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  float sum = 0.0f;
  for (int i = thread; i < width; i += threads) sum += x[i] * x[i];
  sum = sum_of_warp(sum);
  if (thread % 32 == 0) of_warp[thread / 32] = sum;
  __syncthreads();
  sum = 0.0f;
  for (int warp = 0; warp < threads / 32; ++warp) sum += of_warp[warp];
  const float scale = rsqrtf(sum / static_cast<float>(width) + 1e-5f);
  for (int i = thread; i < width; i += threads) y[i] = scale * x[i];
}

/// The sum over a warp of `sums[lane]`: lanes exchange halves of what they have.
template <int Half>
__device__ float total_of_lane(float* sums, int lane) {
  const bool upper = lane & Half;
#pragma unroll
  for (int i = 0; i < Half; ++i) {
    const float a = sums[i], b = sums[i + Half];
    sums[i] = (upper ? b : a) + __shfl_xor_sync(0xffffffffu, upper ? a : b, Half);
  }
  if constexpr (Half > 1)
    return total_of_lane<Half / 2>(sums, lane);
  else
    return sums[0];
}

/// What becomes of a product: it is stored; or added to what is there, a residual; or of two rows next to
/// each other, a gate and what it opens for, `silu(gate) * up` is stored (SwiGLU).
enum class product { stored, added, gated };

/// Matrix (height, width), in bfloat16, times rows of x, (columns, width): y (columns, height), or half as
/// high where rows are gates. Each weight is read once for eight columns. A block has four rows of the
/// matrix, whose width its warps share; a lane reads 16 bytes of each at a time. Both sizes are multiples
/// of 8.
inline constexpr int rows_of_block = 4, columns_of_block = 8, warps_of_product = 4;
template <product Product>
__global__ void multiply(const bfloat16* matrix, int height, int width, const float* x, int columns,
                         float* y) {
  constexpr int rows = rows_of_block, most_columns = columns_of_block, warps = warps_of_product;
  __shared__ float of_warps[warps][rows * most_columns];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  const int first = static_cast<int>(blockIdx.x) * rows;
  const int column = static_cast<int>(blockIdx.y) * most_columns, here = min(most_columns, columns - column);
  matrix += to_size(first) * width;
  x += to_size(column) * width;
  float sums[rows * most_columns] = {};
  for (int i = (warp * 32 + lane) * 8; i < width; i += warps * 256) {
    uint4 weights[rows];
#pragma unroll
    for (int row = 0; row < rows; ++row)
      weights[row] = *reinterpret_cast<const uint4*>(matrix + to_size(row) * width + i);
#pragma unroll
    for (int c = 0; c < most_columns; ++c) {
      if (c >= here) break;
      const float4* const of_x = reinterpret_cast<const float4*>(x + to_size(c) * width + i);
      const float4 low = of_x[0], high = of_x[1];
#pragma unroll
      for (int row = 0; row < rows; ++row) {
        // A bfloat16 is the upper half of a float.
        const auto even = [](unsigned pair) { return __uint_as_float(pair << 16); };
        const auto odd = [](unsigned pair) { return __uint_as_float(pair & 0xffff0000u); };
        const uint4 w = weights[row];
        float sum = sums[row * most_columns + c];
        sum = fmaf(even(w.x), low.x, fmaf(odd(w.x), low.y, sum));
        sum = fmaf(even(w.y), low.z, fmaf(odd(w.y), low.w, sum));
        sum = fmaf(even(w.z), high.x, fmaf(odd(w.z), high.y, sum));
        sum = fmaf(even(w.w), high.z, fmaf(odd(w.w), high.w, sum));
        sums[row * most_columns + c] = sum;
      }
    }
  }
  of_warps[warp][lane] = total_of_lane<16>(sums, lane);
  __syncthreads();
  if (warp != 0) return;
  float sum = 0.0f;
#pragma unroll
  for (const float(&of_warp)[rows * most_columns] : of_warps) sum += of_warp[lane];
  const float next = __shfl_xor_sync(0xffffffffu, sum, most_columns);  // of the row beside
  const int row = first + lane / most_columns, c = lane % most_columns;
  if (c >= here) return;
  const auto at = to_size(column + c);
  if constexpr (Product == product::stored) y[at * height + row] = sum;
  if constexpr (Product == product::added) y[at * height + row] += sum;
  if constexpr (Product == product::gated)
    if (row % 2 == 0) y[at * (height / 2) + row / 2] = sum / (1.0f + expf(-sum)) * next;
}

struct attention_rows {
  bfloat16* queries;        // (rows, query_heads, head_dim)
  bfloat16 *keys, *values;  // (rows, kv_heads, head_dim)
};

/// Queries, keys and values of what `multiply` has made of a row, by a warp for each head: with RoPE, of
/// pairs that lie half a head apart. `similarity`: of queries that are made similar.
static __global__ void rotate(const float* qkv, const row_input* inputs, model_shape model, int layer,
                              float similarity, attention_rows to) {
  const int row = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x) % 32;
  const int warps = static_cast<int>(blockDim.x) / 32, d = model.head_dim;
  const int heads = model.query_heads + 2 * model.kv_heads, position = inputs[row].position;
  for (int head = static_cast<int>(blockIdx.y) * warps + static_cast<int>(threadIdx.x) / 32; head < heads;
       head += static_cast<int>(gridDim.y) * warps) {
    const float* const from = qkv + (to_size(row) * heads + head) * d;
    const bool is_query = head < model.query_heads, is_value = head >= model.query_heads + model.kv_heads;
    float squares = 0.0f;
    for (int i = lane; i < d; i += 32) squares += from[i] * from[i];
    const float norm =
        model.norms_heads && !is_value ? rsqrtf(sum_of_warp(squares) / static_cast<float>(d) + 1e-5f) : 1.0f;
    for (int pair = lane; pair < d / 2; pair += 32) {
      float a = norm * from[pair], b = norm * from[pair + d / 2];
      if (!is_value) {
        const float angle = rope_angle(position, pair, model);
        const float c = cosf(angle), s = sinf(angle), turned = a * c - b * s;
        b = a * s + b * c;
        a = turned;
      }
      if (is_query) {
        if (similarity > 0.0f) {
          const float same = sqrtf(similarity), own = sqrtf(1.0f - similarity);
          a = same * common_query(layer, head, position, pair) + own * a;
          b = same * common_query(layer, head, position, pair + d / 2) + own * b;
        }
        bfloat16* const q = to.queries + (to_size(row) * model.query_heads + head) * d;
        q[pair] = from_float<bfloat16>(a);
        q[pair + d / 2] = from_float<bfloat16>(b);
      } else {
        const int kv_head = (head - model.query_heads) % model.kv_heads;
        bfloat16* const kv = (is_value ? to.values : to.keys) + (to_size(row) * model.kv_heads + kv_head) * d;
        kv[pair] = from_float<bfloat16>(a);
        kv[pair + d / 2] = from_float<bfloat16>(b);
      }
    }
  }
}

/// The token with the largest logit, of equal ones the first, for the row's next step. Ends the step.
static __global__ void choose(const float* logits, int vocab, const row_input* inputs, std::int32_t* chosen,
                              std::int32_t* taken) {
  __shared__ std::uint64_t of_warp[32];
  if (blockIdx.x == 0 && threadIdx.x == 0) ++*taken;
  const int to = inputs[blockIdx.x].to, thread = static_cast<int>(threadIdx.x);
  if (to < 0) return;
  logits += to_size(blockIdx.x) * vocab;
  std::uint64_t best = 0;
  for (int i = thread; i < vocab; i += static_cast<int>(blockDim.x))
    best = max(best, freekv::detail::ordered_key(logits[i], i));
  for (int half = 16; half > 0; half /= 2) best = max(best, __shfl_xor_sync(0xffffffffu, best, half));
  if (thread % 32 == 0) of_warp[thread / 32] = best;
  __syncthreads();
  if (thread > 0) return;
  for (int warp = 1; warp < static_cast<int>(blockDim.x) / 32; ++warp) best = max(best, of_warp[warp]);
  chosen[to] = freekv::detail::unit_of_key(best);
}

}  // namespace kernels

/// Weights, (height, width).
struct matrix {
  int height, width;
  in_device<bfloat16> numbers;
  matrix(int h, int w) : height(h), width(w), numbers(to_size(h) * to_size(w)) {}
};

/// The weights of a decoder, and rows of a step on their way through it, all in the device's memory. What is
/// called is queued on the stream.
class model {
 public:
  struct layer_weights {
    matrix qkv, out, gates, down;  // a gate and what it opens for, in turn
    explicit layer_weights(const model_shape& s)
        : qkv(s.qkv_width(), s.hidden),
          out(s.hidden, s.query_width()),
          gates(2 * s.ffn, s.hidden),
          down(s.hidden, s.ffn) {}
  };
  /// Rows of a layer, which stay until the next step. What its attention gives goes to `out`, (rows,
  /// query_heads, head_dim).
  struct layer_rows {
    kernels::attention_rows in;
    float* out;
  };

  model(const model_shape& shape, int most_rows, int most_sequences, int draft, unsigned seed,
        cudaStream_t stream)
      : shape_(shape),
        most_rows_(most_rows),
        stream_(stream),
        embedding_(shape.vocab, shape.hidden),
        head_(shape.vocab, shape.hidden),
        packets_(ring_depth * numbers(most_rows, 1)),
        inputs_(numbers(most_rows, 1)),
        chosen_(numbers(most_sequences, draft)),
        taken_(1),
        x_(numbers(most_rows, shape.hidden)),
        normed_(x_.size()),
        qkv_(numbers(most_rows, shape.qkv_width())),
        inner_(numbers(most_rows, shape.ffn)),
        logits_(numbers(most_rows, shape.vocab)),
        out_(shape.layers * numbers(most_rows, shape.query_width())),
        queries_(out_.size()),
        keys_(shape.layers * numbers(most_rows, shape.kv_width())),
        values_(keys_.size()) {
    std::uint64_t at = std::uint64_t{seed} << 16;
    const auto fill = [&](const matrix& m) {
      fill_with_normals(m.numbers.data(), m.numbers.size(), 1.0f / std::sqrt(static_cast<float>(m.width)),
                        at++);
    };
    fill(embedding_);
    fill(head_);
    for (int layer = 0; layer < shape.layers; ++layer) {
      layers_.push_back(std::make_unique<layer_weights>(shape));
      for (const matrix* m :
           {&layers_.back()->qkv, &layers_.back()->out, &layers_.back()->gates, &layers_.back()->down})
        fill(*m);
    }
    device::check(cudaMemsetAsync(taken_.data(), 0, sizeof(std::int32_t), stream), "cudaMemsetAsync");
  }

  const model_shape& shape() const { return shape_; }
  const matrix& embedding() const { return embedding_; }
  const matrix& head() const { return head_; }
  const layer_weights& weights(int layer) const { return *layers_[size(layer)]; }

  /// Rows of the next step, for the host to fill when the pipeline has taken that step: then the device is
  /// done with the step `ring_depth` before, as it is behind the one after that.
  std::span<row_input> next_packet() {
    return {packets_.data() + packets_filled_++ % ring_depth * most_rows_, size(most_rows_)};
  }

  // A step is: embed, for each layer before_attention and after_attention, choose.

  void embed(int rows) {
    device::launch("embedding", {rows, threads_for(shape_.hidden), stream_}, kernels::embed,
                   kernels::packet_ring{packets_.data(), ring_depth, most_rows_, taken_.data()},
                   chosen_.data(), inputs_.data(), embedding_.numbers.data(), shape_.hidden, x_.data());
  }
  void before_attention(int layer, int rows, float similarity) {
    norm(0, rows);
    multiply<kernels::product::stored>(weights(layer).qkv, normed_.data(), rows, qkv_.data());
    const dim3 heads(static_cast<unsigned>(rows),
                     static_cast<unsigned>(device::blocks_for(shape_.query_heads + 2 * shape_.kv_heads, 8)));
    device::launch("RoPE", {heads, 256, stream_}, kernels::rotate, qkv_.data(), inputs_.data(), shape_, layer,
                   similarity, rows_of(layer).in);
  }
  void after_attention(int layer, int rows) {
    multiply<kernels::product::added>(weights(layer).out, rows_of(layer).out, rows, x_.data());
    norm(0, rows);
    multiply<kernels::product::gated>(weights(layer).gates, normed_.data(), rows, inner_.data());
    multiply<kernels::product::added>(weights(layer).down, inner_.data(), rows, x_.data());
  }
  /// Of rows from `first` on.
  void choose(int first, int rows) {
    norm(first, rows - first);
    multiply<kernels::product::stored>(head_, normed_.data(), rows - first, logits_.data());
    device::launch("next tokens", {rows - first, threads_for(shape_.vocab, 1024), stream_}, kernels::choose,
                   logits_.data(), shape_.vocab, inputs_.data() + first, chosen_.data(), taken_.data());
  }

  layer_rows rows_of(int layer) const {
    const std::size_t row = numbers(layer, most_rows_);
    const std::size_t q = row * size(shape_.query_width()), kv = row * size(shape_.kv_width());
    return {{queries_.data() + q, keys_.data() + kv, values_.data() + kv}, out_.data() + q};
  }
  const in_device<row_input>& inputs() const { return inputs_; }
  const in_device<std::int32_t>& chosen() const { return chosen_; }

  void fill_with_normals(bfloat16* to, std::size_t n, float scale, std::uint64_t seed) {
    device::launch(
        "random numbers",
        {device::blocks_for(static_cast<std::int64_t>(std::min<std::size_t>(n, 1 << 18)), 256), 256, stream_},
        kernels::fill_with_normals, to, n, scale, seed);
  }

 private:
  static constexpr int ring_depth = device::step_ring::depth + 1;
  static std::size_t size(int n) { return to_size(n); }
  static std::size_t numbers(int rows, int width) { return size(rows) * size(width); }
  static int threads_for(int width, int most = 256) { return std::min(most, (width + 31) / 32 * 32); }

  /// Of rows from `first` on, which come to lie in front.
  void norm(int first, int rows) {
    device::launch("RMSNorm", {rows, threads_for(shape_.hidden), stream_}, kernels::rms_norm,
                   x_.data() + numbers(first, shape_.hidden), shape_.hidden, normed_.data());
  }
  template <kernels::product Product>
  void multiply(const matrix& m, const float* x, int columns, float* y) {
    const dim3 grid(static_cast<unsigned>(device::blocks_for(m.height, kernels::rows_of_block)),
                    static_cast<unsigned>(device::blocks_for(columns, kernels::columns_of_block)));
    device::launch("product with a matrix", {grid, 32 * kernels::warps_of_product, stream_},
                   kernels::multiply<Product>, m.numbers.data(), m.height, m.width, x, columns, y);
  }

  model_shape shape_;
  int most_rows_;
  cudaStream_t stream_;
  matrix embedding_, head_;
  std::vector<std::unique_ptr<layer_weights>> layers_;
  page_locked<row_input> packets_;
  in_device<row_input> inputs_;
  in_device<std::int32_t> chosen_, taken_;
  in_device<float> x_, normed_, qkv_, inner_, logits_, out_;
  in_device<bfloat16> queries_, keys_, values_;
  std::int64_t packets_filled_ = 0;
};

}  // namespace freekv::examples
