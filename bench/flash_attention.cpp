#include <ggml-cpu.h>
#include <ggml.h>
#include <freekv/core/size.hpp>

#include <freekv/core/element.hpp>
#include <stdexcept>

#include "measure.hpp"

namespace freekv::bench {

struct flash_attention::state {
  ggml_context* tensors = nullptr;
  ggml_cgraph* graph = nullptr;
  std::vector<std::uint8_t> work;
  ggml_cplan plan{};
  ggml_threadpool* pool = nullptr;
};

flash_attention::flash_attention(int query_heads, int kv_heads, int head_dim, int tokens, int threads,
                                 bool bf16, fast_normals& random)
    : state_(new state) {
  const std::size_t kv = to_size(tokens) * to_size(kv_heads * head_dim);
  state_->tensors = ggml_init({4 * kv + (std::size_t{64} << 20), nullptr, false});
  ggml_context* const t = state_->tensors;
  const ggml_type type = bf16 ? GGML_TYPE_BF16 : GGML_TYPE_F16;
  ggml_tensor* const q = ggml_new_tensor_4d(t, GGML_TYPE_F32, head_dim, 1, query_heads, 1);
  ggml_tensor* const k = ggml_new_tensor_4d(t, type, head_dim, tokens, kv_heads, 1);
  ggml_tensor* const v = ggml_new_tensor_4d(t, type, head_dim, tokens, kv_heads, 1);
  for (int i = 0; i < query_heads * head_dim; ++i) static_cast<float*>(q->data)[i] = random.next();
  for (ggml_tensor* const x : {k, v})
    for (std::size_t i = 0; i < kv; ++i) {
      if (bf16)
        static_cast<bfloat16*>(x->data)[i] = from_float<bfloat16>(random.next());
      else
        static_cast<half*>(x->data)[i] = from_float<half>(random.next());
    }
  ggml_tensor* const out =
      ggml_flash_attn_ext(t, q, k, v, nullptr, 1.0f / std::sqrt(static_cast<float>(head_dim)), 0.0f, 0.0f);
  state_->graph = ggml_new_graph(t);
  ggml_build_forward_expand(state_->graph, out);
  ggml_threadpool_params parameters = ggml_threadpool_params_default(threads);
  // Its threads sleep between runs, as by default they spin on cores that others are measured on.
  parameters.poll = 0;
  state_->pool = ggml_threadpool_new(&parameters);
  state_->plan = ggml_graph_plan(state_->graph, threads, state_->pool);
  state_->work.resize(state_->plan.work_size);
  state_->plan.work_data = state_->work.data();
}

flash_attention::~flash_attention() {
  ggml_threadpool_free(state_->pool);
  ggml_free(state_->tensors);
  delete state_;
}

void flash_attention::run() {
  if (ggml_graph_compute(state_->graph, &state_->plan) != GGML_STATUS_SUCCESS)
    throw std::runtime_error("llama.cpp's attention failed");
}

}  // namespace freekv::bench
