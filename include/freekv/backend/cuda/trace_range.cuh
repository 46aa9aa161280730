// Ranges in a profiler's timeline: NVTX's where FREEKV_WITH_NVTX is defined, else nothing.
#pragma once

#if defined(FREEKV_WITH_NVTX)
#include <nvtx3/nvToolsExt.h>
#endif

namespace freekv::device {

/// Range of the calling thread, for as long as this lives; `of` is the number of the layer or sequence that
/// it is about.
class [[maybe_unused]] trace_range {
 public:
#if defined(FREEKV_WITH_NVTX)
  explicit trace_range(const char* name, int of = -1) {
    nvtxEventAttributes_t range{};
    range.version = NVTX_VERSION;
    range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    range.messageType = NVTX_MESSAGE_TYPE_ASCII;
    range.message.ascii = name;
    range.payloadType = NVTX_PAYLOAD_TYPE_INT32;
    range.payload.iValue = of;
    nvtxRangePushEx(&range);
  }
  ~trace_range() { nvtxRangePop(); }
  trace_range(const trace_range&) = delete;
  trace_range& operator=(const trace_range&) = delete;
#else
  explicit trace_range(const char*, int = 0) {}
#endif
};

}  // namespace freekv::device
