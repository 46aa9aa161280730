// Prefixes saved and loaded by a device's pipelines, and by each side what the other has saved: a sequence
// that begins with one gives what its rows would give.
//
// Exit status: 0 all right, 1 not, 77 no device.
#include <freekv/freekv.cuh>

#include "both_sides.cuh"
#include "prefix_case.hpp"

namespace {

using namespace both_sides;
using namespace prefix_case;

/// What both sides are given; policies' data of a device are in its own memory.
struct shared_input {
  pinned<half> keys[layers], values[layers];
  pinned<float> queries[layers], out, basis, factors_of_keys, frequencies;
  input of_host, of_device;

  shared_input(bool coefficients, bool pins) : out(query_row) {
    random_numbers random(7);
    for (int layer = 0; layer < layers; ++layer) {
      of_host.keys[layer] = keys[layer] = random.normals<half>(max_tokens * key_row);
      of_host.values[layer] = values[layer] = random.normals<half>(max_tokens * key_row);
      of_host.queries[layer] = queries[layer] = random.normals<float>(max_tokens * query_row);
    }
    of_host.out = out;
    of_host.coefficients = coefficients;
    of_host.pins = pins;
    basis = random.normals<float>(to_size(layers * kv_heads * (rank + 1) * head_dim), 0.2f);
    factors_of_keys = random.normals<float>(to_size(layers * kv_heads * (factors + 1) * head_dim), 0.1f);
    frequencies = random.normals<float>(20, 0.1f);
    of_device = of_host;
    const auto give = [](const pinned<float>& from, const float*& host, const float*& there) {
      host = from.data();
      void* to = nullptr;
      require(cudaMalloc(&to, from.size() * sizeof(float)), "cudaMalloc");
      require(cudaMemcpy(to, from.data(), from.size() * sizeof(float), cudaMemcpyHostToDevice), "cudaMemcpy");
      there = static_cast<float*>(to);
    };
    give(basis, of_host.basis, of_device.basis);
    give(factors_of_keys, of_host.factors, of_device.factors);
    give(frequencies, of_host.frequencies, of_device.frequencies);
  }
  ~shared_input() {
    for (const float* data : {of_device.basis, of_device.factors, of_device.frequencies})
      cudaFree(const_cast<float*>(data));
  }
};

/// A device's pipeline and what it stands on.
struct device_side {
  device::owned_stream compute, recall;
  device::pinned_memory slow;
  device::device_memory fast;
  cuda_backend backend{compute.get(), recall.get()};
  side<cuda_backend> on;
  explicit device_side(const shared_input& in) : on(in.of_device, backend, {&slow, &fast}) {}
};

bool refuses_damage(side<cuda_backend>& on, const std::string& bytes) {
  const int free = on.pipeline.free_pages();
  random_numbers random(3);
  for (int i = 0; i < 40; ++i) {
    std::string damaged = bytes;
    char& byte = damaged[to_size(random.below(static_cast<int>(bytes.size())))];
    byte = static_cast<char>(byte ^ random.between(1, 255));
    try {
      const prefix loaded = on.load(damaged);
      std::printf("FAILED damage is loaded\n");
      return false;
    } catch (const prefix_error&) {
    }
  }
  if (on.pipeline.free_pages() == free) return true;
  std::printf("FAILED pages are lost\n");
  return false;
}

}  // namespace

int main() {
  skip_without_device();
  report checks;
  bool right = true;
  for (const auto& [coefficients, pins] : {std::pair{false, true}, {true, true}, {true, false}}) {
    const std::string codec =
        coefficients ? pins ? ", low_rank_keys" : ", low_rank_keys, no pins" : ", identity";
    const shared_input in(coefficients, pins);
    const of_host host = run_host(in.of_host);
    const std::string from_device = device_side(in).on.save();
    device_side there(in);
    if (there.on.save(prefix_case::prompt_rows / 2) != from_device) {
      std::printf("FAILED decode rows are kept as a prompt's are%s\n", codec.c_str());
      right = false;
    }
    const std::vector<float> expected = there.on.expected();
    const auto both = [](const std::vector<float>& a, const std::vector<float>& b) {
      results<float> of_both(pinned<float>(a.begin(), a.end()));
      of_both.device.assign(b.begin(), b.end());
      return of_both;
    };
    checks.equal("of a device, loaded there" + codec, both(expected, there.on.given(from_device)));
    checks.equal("of the host, loaded there" + codec,
                 both(host.expected, given_by_host(in.of_host, host.saved)));
    // The sides sum in other orders.
    checks.close("of the host, loaded by a device" + codec, both(expected, there.on.given(host.saved)), 400);
    checks.close("of a device, loaded by the host" + codec,
                 both(host.expected, given_by_host(in.of_host, from_device)), 400);
    right = refuses_damage(there.on, from_device) && right;
  }
  return checks.finish() == 0 && right ? 0 : 1;
}
