// A backend that has no stream beside the one it computes on.
#include <freekv/freekv.hpp>

struct one_stream {
  using policy_kind = freekv::backend_kind;
  using event = freekv::host::event;
  template <class State, class Settings>
  using stages = freekv::host::stages<State, Settings>;
  freekv::host::stream& compute() { return host.compute(); }
#ifdef FREEKV_FIXED
  freekv::host::stream& recall() { return host.recall(); }
#endif
  operator freekv::host_backend&() { return host; }
  freekv::host_backend host;
};

void use(one_stream& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, one_stream> pipeline({.model = {.layers = 2}},
                                                                               backend);
}
