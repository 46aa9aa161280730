// A codec whose pages never come back.
#include <freekv/freekv.hpp>

struct forgetful {
  using policy_kind = freekv::codec_kind;
  static constexpr std::string_view name = "forgetful";
  constexpr std::size_t bytes(freekv::kv_extent, std::size_t) const { return 4; }
  template <int HeadDim, class Team, class Element>
  void encode(Team, const freekv::head_slice<const Element>&, int, std::byte*) const {}
#ifdef FREEKV_FIXED
  template <int HeadDim, class Team, class Element>
  void decode(Team, const std::byte*, int, freekv::row_range, const freekv::head_slice<Element>&) const {}
#endif
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, forgetful> pipeline({.model = {.layers = 2}},
                                                                              backend);
}
