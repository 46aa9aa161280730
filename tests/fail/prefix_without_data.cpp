// A prefix of a summary with data that nobody can tell from other data.
#include <freekv/freekv.hpp>

struct mean_of_head : freekv::mean {
  const float* offsets = nullptr;  // (layers, kv_heads)
  constexpr freekv::mean at(int, int) const { return *this; }
#ifdef FREEKV_FIXED
  using hooks = freekv::hooks_of<freekv::mean>::with<freekv::hook::at, freekv::hook::data>;
  template <class Visit>
  void data(const Visit& visit) const {
    visit(offsets, 8 * sizeof(float));
  }
#else
  using hooks = freekv::hooks_of<freekv::mean>::with<freekv::hook::at>;
#endif
};

using pipeline = freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, mean_of_head>;
void use(pipeline& retrieval, const freekv::prefix& kept) { retrieval.save_prefix(kept, "prefix", 0); }
