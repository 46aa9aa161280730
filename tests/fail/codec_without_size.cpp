// A codec that does not say how many bytes a page takes.
#include <freekv/freekv.hpp>

struct boundless {
  using policy_kind = freekv::codec_kind;
  static constexpr std::string_view name = "boundless";
#ifdef FREEKV_FIXED
  constexpr std::size_t bytes(freekv::kv_extent, std::size_t) const { return 4; }
#endif
  template <int HeadDim, class Team, class Element>
  void encode(Team, const freekv::head_slice<const Element>&, int, std::byte*) const {}
  template <int HeadDim, class Team, class Element>
  void decode(Team, const std::byte*, int, freekv::row_range, const freekv::head_slice<Element>&) const {}
};

void use(freekv::host_backend& backend) {
  freekv::retrieval_pipeline<freekv::kv_shape<float, 64>, boundless> pipeline({.model = {.layers = 2}},
                                                                              backend);
}
