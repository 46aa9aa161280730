// What a codec of the library gives back of a page, of whatever element and head_dim. (Codecs have tests of
// their own.)
#pragma once

#include <cstddef>
#include <freekv/core/unroll.hpp>
#include <functional>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "compiled_shapes.hpp"
#include "pipeline.hpp"

namespace tests {

using rows_of_heads = std::vector<std::vector<float>>;  // per KV head (tokens, head_dim)

/// Page `page` of a sequence's only layer.
template <class Element, int HeadDim>
void read_back_as(const freekv::examples::pipeline_options& o, int page, rows_of_heads& keys,
                  rows_of_heads& values) {
  using namespace freekv;
  constexpr auto n = [](int x) { return static_cast<std::size_t>(x); };
  const examples::method_data data{.factors = o.factors, .rotary = o.rotary, .channels = o.channels};
  const auto chosen_codec =
      examples::find_by_name("codec", examples::codecs, o.method.codec).make(o.method, data);
  resolve(chosen_codec, [&](const auto& c) {
    const kv_extent geometry{o.page, HeadDim};
    const std::size_t bytes = c.bytes(geometry, sizeof(Element));
    std::vector<float> shared(shared_bytes(c, geometry, sizeof(Element)) / sizeof(float) + 1);
    std::vector<float> floats(n(shared_floats(c, geometry)) + 1);
    std::vector<std::vector<float>> stored(keys.size(), std::vector<float>(bytes / sizeof(float)));
    std::vector<Element> rows(n(2 * o.page * HeadDim));
    const head_slice<Element> slice{rows.data(), rows.data() + o.page * HeadDim, HeadDim};
    const auto each_head = [&](const auto& use) {
      for (std::size_t h = 0; h < keys.size(); ++h)
        use(codec_at(c, slice_place{0, static_cast<int>(h), static_cast<int>(keys.size()), page * o.page,
                                    reinterpret_cast<std::byte*>(shared.data()), floats.data()}),
            reinterpret_cast<std::byte*>(stored[h].data()), h);
    };
    each_head([&](const auto& codec, std::byte* to, std::size_t h) {
      for (std::size_t i = 0; i < keys[h].size(); ++i) {
        slice.key[i] = from_float<Element>(keys[h][i]);
        slice.value[i] = from_float<Element>(values[h][i]);
      }
      codec.template encode<HeadDim>(scalar_team{}, detail::as_const(slice), o.page, to);
    });
    each_head([&](const auto& codec, const std::byte* from, std::size_t h) {
      codec.template decode<HeadDim>(scalar_team{}, from, o.page, row_range{0, o.page}, slice);
      for (std::size_t i = 0; i < keys[h].size(); ++i) {
        keys[h][i] = to_float(slice.key[i]);
        values[h][i] = to_float(slice.value[i]);
      }
    });
  });
}

/// For the oracle's settings. What `o` points to outlives it.
inline std::function<void(int, rows_of_heads&, rows_of_heads&)> read_back(
    const freekv::examples::pipeline_options& o) {
  if (o.method.codec == freekv::identity::name) return nullptr;
  return [o](int page, rows_of_heads& keys, rows_of_heads& values) {
    using freekv::examples::data_type;
    const auto as = [&]<class Element>(Element) {
      bool found = false;
      freekv::unroll<std::size(freekv::examples::head_dims)>([&](auto which) {
        constexpr int head_dim = freekv::examples::head_dims[which];
        if (head_dim != o.head_dim) return;
        read_back_as<Element, head_dim>(o, page, keys, values);
        found = true;
      });
      if (!found) throw std::logic_error("no codecs are compiled for head_dim " + std::to_string(o.head_dim));
    };
    if (o.element == data_type::f32) as(float{});
    if (o.element == data_type::f16) as(freekv::half{});
    if (o.element == data_type::bf16) as(freekv::bfloat16{});
  };
}

}  // namespace tests
