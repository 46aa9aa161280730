// When each kernel of a CUDA program began and ended, graphs' included: a library that the driver loads into
// the program, by CUPTI.
//
//   CUDA_INJECTION64_PATH=$PWD/libfreekv-trace.so FREEKV_TRACE=FILE program..
//
// FILE gets a line for each kernel, tab-separated: its name, its stream, and nanoseconds at its begin and its
// end. Kernels of a captured graph run in streams of the graph's own. trace.py makes a table of it.
#include <cupti.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

namespace {

std::FILE* file = nullptr;
constexpr std::size_t buffer_bytes = 8 << 20;

void CUPTIAPI give_buffer(std::uint8_t** buffer, std::size_t* bytes, std::size_t* most_records) {
  *buffer = static_cast<std::uint8_t*>(std::aligned_alloc(8, buffer_bytes));
  *bytes = *buffer == nullptr ? 0 : buffer_bytes;
  *most_records = 0;
}

void CUPTIAPI write_buffer(CUcontext, std::uint32_t, std::uint8_t* buffer, std::size_t, std::size_t bytes) {
  CUpti_Activity* record = nullptr;
  while (cuptiActivityGetNextRecord(buffer, bytes, &record) == CUPTI_SUCCESS) {
    if (record->kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) continue;
    const auto* const kernel = reinterpret_cast<const CUpti_ActivityKernel9*>(record);
    const auto number = [](std::uint64_t x) { return static_cast<unsigned long long>(x); };
    std::fprintf(file, "%s\t%u\t%llu\t%llu\n", kernel->name, kernel->streamId, number(kernel->start),
                 number(kernel->end));
  }
  std::free(buffer);
}

void flush() {
  cuptiActivityFlushAll(1);
  std::fclose(file);
}

}  // namespace

/// The driver calls this when the program first uses it; 1: all right.
extern "C" int InitializeInjection() {
  const char* const path = std::getenv("FREEKV_TRACE");
  if (path == nullptr || (file = std::fopen(path, "w")) == nullptr) {
    std::fprintf(stderr, "FREEKV_TRACE names no file that can be written; name one.\n");
    return 0;
  }
  if (cuptiActivityRegisterCallbacks(give_buffer, write_buffer) != CUPTI_SUCCESS ||
      cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL) != CUPTI_SUCCESS) {
    std::fprintf(stderr, "CUPTI records no kernels here; profilers may be running, or not be permitted.\n");
    return 0;
  }
  std::atexit(flush);
  return 1;
}
