// A system prompt computed once: its pages in a file, and through a stream, for pipelines that begin with it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <freekv/freekv.hpp>
#include <vector>

namespace fk = freekv;
using pipeline = fk::retrieval_pipeline<fk::kv_shape<fk::bfloat16, 128>, fk::int8_token>;  // pages in int8

/// Stands for a socket.
struct channel {
  std::vector<std::byte> sent{};
  std::size_t received = 0;
  void send(std::span<const std::byte> bytes) { sent.insert(sent.end(), bytes.begin(), bytes.end()); }
  void receive(std::span<std::byte> bytes) {
    std::copy_n(sent.data() + received, bytes.size(), bytes.data());
    received += bytes.size();
  }
};

int main() {
  constexpr int rows = 1000, whole_pages = rows / 32 * 32;
  pipeline::settings settings{.model = {.layers = 2, .query_heads = 8, .kv_heads = 2},
                              .capacity = {.max_tokens = 2048}};
  settings.budget = {.sink = 64, .window = 128, .selected_units = 10};
  const std::uint64_t fingerprint = 0x5eed;  // the engine's own, of weights, adapters and the prompt's tokens
  const std::string path = (std::filesystem::temp_directory_path() / "freekv-saved-prefix").string();
  channel socket;

  {  // one process
    fk::host_backend backend({.threads = 2});
    pipeline retrieval(settings, backend);
    const fk::sequence_id sequence = retrieval.open();
    std::vector<float> k(rows * 2 * 128, 0.1f), v(k);
    auto prompt = retrieval.begin_step({{sequence, rows, fk::step_phase::prefill}});
    for (int layer = 0; layer < 2; ++layer) prompt.append<float>(layer, {.keys = k, .values = v});
    prompt.end();
    const fk::prefix prefix = retrieval.keep_prefix(sequence, rows);
    retrieval.save_prefix(prefix, path, fingerprint);
    // or to a peer, by a function that sends
    retrieval.save_prefix(
        prefix, [&](std::span<const std::byte> bytes) { socket.send(bytes); }, fingerprint);
  }

  settings.budget.selected_units = 20;  // which may differ, as the route and the store's place
  settings.capacity.max_sequences = 2;
  fk::host_backend backend({.threads = 2});
  pipeline retrieval(settings, backend);
  fk::sequence_id first{}, second{};
  try {
    const fk::prefix prefix = retrieval.load_prefix(path, fingerprint);
    first = retrieval.open(prefix);  // as if the rows had been its prompt; any number of sequences may
    const fk::prefix received =
        retrieval.load_prefix([&](std::span<std::byte> bytes) { socket.receive(bytes); }, fingerprint);
    second = retrieval.open(received);
  } catch (const fk::prefix_error& error) {  // damaged, or of another model: nothing has changed
    std::puts(error.what());
    return 1;
  }
  std::filesystem::remove(path);
  return retrieval.tokens(first) == whole_pages && retrieval.tokens(second) == whole_pages ? 0 : 1;
}
