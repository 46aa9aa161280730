// A judge of an eviction that lets query heads choose for their layer.
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>

#ifdef FREEKV_FIXED
using judged = freekv::defensive_kv;
#else
using judged = freekv::compress_kv;
#endif

auto use(const freekv::testing::eviction_definition& definition) {
  return freekv::testing::conforms<judged>(definition);
}
