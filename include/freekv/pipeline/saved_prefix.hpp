// A prefix outside its pipeline: pages as the store keeps them, with their summaries, in a file or in any
// stream of bytes.
//
// A saved prefix is, in the writing machine's byte order: a preamble; a text that says what it fits, a line
// each; their checksum; then blocks with checksums (checked_stream.hpp) of, layer by layer,
//   - slices (page, KV head, bytes of the codec), where the layer encodes pages, else elements (page, KV
//     head, 2, token, head_dim), which are what the codec `identity` stores;
//   - what a codec's heads share (page, shared_bytes), where it has such;
//   - of each KV head that selects, summaries (page, unit, summary_bytes), and where units are pinned their
//     worth (page, unit).
// So it depends neither on the layout of pages nor on where the store is.
#pragma once

#include <algorithm>
#include <array>
#include <charconv>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <freekv/core/error.hpp>
#include <freekv/core/hooks.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/selection_state.hpp>
#include <freekv/pipeline/sequences.hpp>
#include <freekv/policies/codec.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/storage/checked_stream.hpp>
#include <freekv/storage/memory.hpp>
#include <freekv/storage/whole_file.hpp>
#include <limits>
#include <memory_resource>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

namespace freekv::detail {

/// First bytes of a saved prefix.
struct prefix_preamble {
  std::array<char, 8> magic{'F', 'r', 'e', 'e', 'K', 'V', ' ', 'p'};
  std::uint32_t byte_order = 0x01020304;
  std::uint32_t version = 1;
  std::uint32_t text_bytes = 0;
  std::int32_t pages = 0;

  static constexpr std::uint32_t most_text = 1 << 20;
};
static_assert(std::has_unique_object_representations_v<prefix_preamble>);

inline std::string hexadecimal(std::uint64_t number) {
  char digits[16];
  return "0x" + std::string(digits, std::to_chars(digits, digits + sizeof digits, number, 16).ptr);
}

/// Throws prefix_error where a line of one text, "name value", is not the other's.
[[gnu::cold]] inline void expect_same_lines(const std::string& name, std::string_view saved,
                                            std::string_view pipelines) {
  const auto next_line = [](std::string_view& text) {
    const std::string_view line = text.substr(0, text.find('\n'));
    text.remove_prefix(std::min(line.size() + 1, text.size()));
    return std::string(line);
  };
  while (!saved.empty() || !pipelines.empty())
    if (const std::string has = next_line(saved), wanted = next_line(pipelines); has != wanted)
      throw prefix_error(name + " is of \"" + has + "\", and the pipeline of \"" + wanted +
                         "\"; load it where settings and model are those that it was saved with, or save the "
                         "prefix again");
}

/// Pages and stream of prefixes that one pipeline saves or loads. `Core` is its pipeline_core; nothing is
/// queued.
template <class Core>
class saved_prefix {
  using state = typename Core::state;

 public:
  /// `model`: what the pages depend on and the pipeline does not know.
  [[gnu::cold]] saved_prefix(Core& core, std::uint64_t model)
      : memory_{core}, core_(core), buffers_(*std::pmr::new_delete_resource(), carve(nullptr)) {
    carve(buffers_.data());
    std::fill_n(page_, page_bytes_, std::byte{0});
    text_ = text_of(model);
  }
  saved_prefix(const saved_prefix&) = delete;
  saved_prefix& operator=(const saved_prefix&) = delete;
  ~saved_prefix() {
    try {
      memory_.finish();
    } catch (const error&) {  // of a device that has failed: nothing is under way there
    }
  }

  template <class Write>
  [[gnu::cold]] void save(const prefix& kept, const Write& write) {
    const auto pages = core_.sequences->pages_of(kept, "save_prefix");
    prefix_preamble preamble{.text_bytes = static_cast<std::uint32_t>(text_.size()), .pages = kept.pages()};
    const std::uint64_t sum = checksum(std::as_bytes(std::span(text_)), of_preamble(preamble));
    write(bytes_of(preamble));
    write(std::as_bytes(std::span(text_)));
    write(bytes_of(sum));
    checked_writer blocks(write, memory_, block_, sum);
    each_part(way::out, pages, [&](const std::byte* from, std::size_t bytes) { blocks.put(from, bytes); });
    blocks.end();
  }

  /// `name`: what it is called in errors. `size`: its bytes, where they are known.
  template <class Read>
  [[gnu::cold]] prefix load(const Read& read, const std::string& name, std::optional<std::uint64_t> size) {
    constexpr std::uint64_t least = sizeof(prefix_preamble) + sizeof(std::uint64_t);
    const auto damaged = [&](const std::string& how) {
      throw prefix_error(name + " is damaged: " + how + "; remove it, and save the prefix again");
    };
    if (size && *size < least) damaged("it has " + std::to_string(*size) + " bytes");
    prefix_preamble preamble;
    read(std::as_writable_bytes(std::span(&preamble, 1)));
    constexpr prefix_preamble ours;
    if (preamble.magic != ours.magic)
      throw prefix_error(name + " is not a saved prefix; name one that save_prefix has written");
    if (preamble.byte_order != ours.byte_order)
      throw prefix_error(
          name + " is of a machine with the other byte order; save the prefix again on one like this");
    if (preamble.version != ours.version)
      throw prefix_error(name + " has version " + std::to_string(preamble.version) +
                         " of the format, and this library knows " + std::to_string(ours.version) +
                         "; save the prefix again with this library");
    if (preamble.text_bytes > prefix_preamble::most_text || preamble.pages < 0 ||
        (size && *size < least + preamble.text_bytes))
      damaged("its beginning is not what was written");
    std::string text(preamble.text_bytes, '\0');
    read(std::as_writable_bytes(std::span(text)));
    std::uint64_t sum = 0;
    read(std::as_writable_bytes(std::span(&sum, 1)));
    if (sum != checksum(std::as_bytes(std::span(text)), of_preamble(preamble)))
      damaged("its beginning is not what was written");
    expect_same_lines(name, text, text_);

    const std::uint64_t bytes = static_cast<std::uint64_t>(preamble.pages) * bytes_of_page();
    if (const std::uint64_t all = least + text.size() + checked_blocks::stored(bytes); size && *size != all)
      damaged("it has " + std::to_string(*size) + " bytes, and " + std::to_string(all) + " were written");
    prefix loaded = core_.sequences->take(preamble.pages);
    checked_reader blocks(read, memory_, block_, sum, bytes, name);
    each_part(way::in, core_.sequences->pages_of(loaded, "load_prefix"),
              [&](std::byte* to, std::size_t count) { blocks.take(to, count); });
    memory_.finish();
    return loaded;
  }

 private:
  enum class way : std::uint8_t { out, in, none };

  /// Copies between the block and the pipeline's memory.
  struct memory_of {
    Core& core;
    void copy(std::byte* to, const std::byte* from, std::size_t bytes) {
      core.stages().queue_copy(to, from, bytes);
    }
    void finish() { core.synchronize(); }
  };

  template <class T>
  static std::span<const std::byte> bytes_of(const T& one) {
    return std::as_bytes(std::span(&one, 1));
  }
  static std::uint64_t of_preamble(const prefix_preamble& preamble) { return checksum(bytes_of(preamble)); }

  /// A block, and, where the store is a file, a page's slices; counted where `memory` is null.
  std::size_t carve(std::byte* memory) {
    carver buffers(memory);
    block_ = buffers.take<std::byte>(checked_blocks::room);
    if (core_.settings.capacity.store_file)
      for (const state& s : core_.memory->layers)
        page_bytes_ = std::max(page_bytes_, s.slices.slice_bytes * to_size(s.heads.kv));
    page_ = core_.settings.capacity.store_file
                ? buffers.take_aligned(page_bytes_, core_.settings.capacity.store_file->alignment())
                : nullptr;
    return buffers.used();
  }

  /// Calls `move(bytes, count)` for all that the store's pages `pages` have, in the stream's order, to be
  /// read or written.
  template <class Move>
  void each_part(way direction, std::span<const store_page_id> pages, const Move& move) {
    for (const state& s : core_.memory->layers) {
      for (const store_page_id page : pages) each_slice(s, direction, page, move);
      if (s.encoded && s.shared_bytes > 0)
        for (const store_page_id page : pages) move(s.shared_of(page), s.shared_bytes);
      if (s.kind != layer_kind::retrieval) continue;
      const auto units = to_size(s.units_per_page);
      for (int head = 0; head < s.heads.kv; ++head) {
        if (head_kind(core_.settings.plan, s.layer, head) != layer_kind::retrieval) continue;
        for (const store_page_id page : pages) {
          move(s.summary_of(page, head), units * s.summary_bytes);
          if (s.pins > 0)
            move(reinterpret_cast<std::byte*>(&s.pin_worth_of(page, head, 0)), units * sizeof(float));
        }
      }
    }
  }
  template <class Move>
  void each_slice(const state& s, way direction, store_page_id page, const Move& move) {
    if (!s.encoded) {
      const std::size_t row = sizeof(typename state::element) * to_size(state::head_dim);
      for (int head = 0; head < s.heads.kv; ++head) {
        const auto slice = slice_of(s.store, page, head);
        for (auto* const plane : std::array{slice.key, slice.value}) {
          const bool dense = slice.stride == state::head_dim;
          const int rows = dense ? 1 : s.page.tokens;
          const std::size_t bytes = dense ? row * to_size(s.page.tokens) : row;
          for (int r = 0; r < rows; ++r) move(reinterpret_cast<std::byte*>(plane + r * slice.stride), bytes);
        }
      }
      return;
    }
    const auto heads = to_size(s.heads.kv);
    const std::size_t bytes = resolve(core_.settings.codec, [&](const auto& codec) {
      return codec.bytes(s.page, sizeof(typename state::element));
    });
    if (s.slices.file == nullptr) {
      move(s.slices.in_memory(page, 0), heads * bytes);
      return;
    }
    if (direction == way::out) {
      const file_read all{s.slices.first + s.slices.offset(page, 0), page_, heads * s.slices.slice_bytes};
      s.slices.file->read({&all, 1});
    }
    for (std::size_t head = 0; head < heads; ++head) move(page_ + head * s.slices.slice_bytes, bytes);
    if (direction == way::in) s.slices.write_page(page, page_);
  }
  std::uint64_t bytes_of_page() {
    std::uint64_t all = 0;
    each_part(way::none, std::array{store_page_id{0}},
              [&](const std::byte*, std::size_t bytes) { all += bytes; });
    return all;
  }

  /// Settings and model that a saved prefix fits, a line each.
  std::string text_of(std::uint64_t model) {
    const auto& s = core_.settings;
    std::string text;
    const auto line = [&text](const char* name, const std::string& value) {
      text.append(name).append(" ").append(value).append("\n");
    };
    line("model", hexadecimal(model));
    line("element", std::string(element_name<typename state::element>));
    line("head_dim", std::to_string(int{state::head_dim}));
    line("page", std::to_string(int{s.page.tokens}));
    line("unit", std::to_string(s.unit_tokens()));
    line("kv_heads", std::to_string(s.model.kv_heads));
    line("layers", std::to_string(s.model.layers));
    line("plan", plan_of(s));
    if (!s.attention.key_scales.empty()) line("key_scales", sum_of(s.attention.key_scales));
    if (!s.attention.value_scales.empty()) line("value_scales", sum_of(s.attention.value_scales));
    line("codec", name_of(s.codec));
    line("summary", name_of(s.summary));
    line("pinning", s.pinned_units() > 0 ? name_of(s.pinning) : "none");
    if (text.size() > prefix_preamble::most_text)
      throw usage_error("save_prefix: what the prefix fits takes " + std::to_string(text.size()) +
                        " bytes to say; a plan by head has to be shorter");
    return text;
  }
  static std::string sum_of(const std::vector<float>& numbers) {
    return hexadecimal(checksum(std::as_bytes(std::span(numbers))));
  }
  /// Kinds of layers, a letter each, or one for each of its KV heads where these are not alike.
  static std::string plan_of(const auto& s) {
    std::string all;
    for (int layer = 0; layer < s.model.layers; ++layer) {
      std::string heads;
      for (int head = 0; head < s.model.kv_heads; ++head)
        heads += "rcws"[static_cast<int>(head_kind(s.plan, layer, head))];
      const bool alike = heads.find_first_not_of(heads[0]) == std::string::npos;
      all += alike ? heads.substr(0, 1) : "(" + heads + ")";
    }
    return all;
  }
  /// A policy in words, with a checksum of the arrays that it was given.
  template <class Policy>
  std::string name_of(const Policy& policy) {
    return resolve(policy, [&](const auto& chosen) {
      std::uint64_t sum = 0;
      bool any = false;
      visit_data(chosen, [&](const void* array, std::size_t bytes) {
        any = true;
        const auto* from = static_cast<const std::byte*>(array);
        for (std::size_t part; bytes > 0; from += part, bytes -= part) {
          part = std::min(bytes, checked_blocks::bytes);
          memory_.copy(block_, from, part);
          memory_.finish();
          sum = checksum({block_, part}, sum);
        }
      });
      return printed(chosen) + (any ? " of data " + hexadecimal(sum) : "");
    });
  }

  memory_of memory_;
  Core& core_;
  std::byte* block_ = nullptr;
  std::byte* page_ = nullptr;
  std::size_t page_bytes_ = 0;
  memory_block buffers_;
  std::string text_;
};

/// Saves to a path, or by a function that writes.
template <class Core, class To>
[[gnu::cold]] void save_prefix(Core& core, const prefix& kept, const To& to, std::uint64_t model) {
  static_assert(
      std::convertible_to<const To&, std::string> || std::invocable<const To&, std::span<const std::byte>>,
      "save_prefix takes a path, or a function of std::span<const std::byte>, which writes it");
  saved_prefix saved(core, model);
  if constexpr (std::convertible_to<const To&, std::string>) {
    new_file file(to, "prefix file");
    saved.save(kept, [&](std::span<const std::byte> bytes) { file.write(bytes); });
    file.put_in_place();
  } else {
    saved.save(kept, to);
  }
}

/// Loads from a path, or by a function that reads.
template <class Core, class From>
[[gnu::cold]] prefix load_prefix(Core& core, const From& from, std::uint64_t model) {
  static_assert(
      std::convertible_to<const From&, std::string> || std::invocable<const From&, std::span<std::byte>>,
      "load_prefix takes a path, or a function of std::span<std::byte>, which fills it");
  saved_prefix saved(core, model);
  if constexpr (std::convertible_to<const From&, std::string>) {
    whole_file file(from, "prefix file");
    return saved.load([&](std::span<std::byte> bytes) { file.read(bytes); },
                      "prefix file " + std::string(from), file.size());
  } else {
    return saved.load(from, "the prefix", std::nullopt);
  }
}

}  // namespace freekv::detail
