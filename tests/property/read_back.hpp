// What a codec of the library gives back of a page, of whatever element and head_dim. (Codecs have tests of their own.)
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "pipeline.hpp"

namespace tests {

template <class Element, int HeadDim>
void read_back_as(const std::string& codec, int page, std::vector<float>& keys, std::vector<float>& values) {
  using namespace freekv;
  constexpr auto n = [](int x) { return static_cast<std::size_t>(x); };
  std::vector<Element> rows(n(2 * page * HeadDim));
  const head_slice<Element> slice{rows.data(), rows.data() + page * HeadDim, HeadDim};
  for (std::size_t i = 0; i < keys.size(); ++i) {
    slice.key[i] = from_float<Element>(keys[i]);
    slice.value[i] = from_float<Element>(values[i]);
  }
  const auto chosen_codec = examples::chosen("codec", examples::codecs, codec).make({}, {});
  resolve(chosen_codec, [&](const auto& c) {
    const std::size_t bytes = c.bytes(page_geometry{page, HeadDim}, sizeof(Element));
    std::vector<float> stored(bytes / sizeof(float));
    auto* const at = reinterpret_cast<std::byte*>(stored.data());
    c.template encode<HeadDim>(as_const(slice), page, at);
    c.template decode<HeadDim>(at, page, slice);
  });
  for (std::size_t i = 0; i < keys.size(); ++i) {
    keys[i] = to_float(slice.key[i]);
    values[i] = to_float(slice.value[i]);
  }
}

/// For the oracle's settings.
inline std::function<void(std::vector<float>&, std::vector<float>&)> read_back(
    const freekv::examples::pipeline_options& o) {
  if (o.does.codec == freekv::identity::name) return nullptr;
  return [codec = o.does.codec, page = o.page, head_dim = o.head_dim, element = o.element](
             std::vector<float>& keys, std::vector<float>& values) {
    const auto with = [&]<int... D>(std::integer_sequence<int, D...>) {
      using freekv::examples::data_type;
      const auto as = [&]<class Element>(Element) {
        ((D == head_dim && (read_back_as<Element, D>(codec, page, keys, values), true)) || ...);
      };
      if (element == data_type::f32) as(float{});
      if (element == data_type::f16) as(freekv::half{});
      if (element == data_type::bf16) as(freekv::bfloat16{});
    };
    with(std::integer_sequence<int, FREEKV_HEAD_DIMS>{});
  };
}

}  // namespace tests
