// A judge of an eviction that gives heads budgets over all layers, of which its sequences have one.
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>

#ifdef FREEKV_FIXED
using judged = freekv::defensive_kv;
#else
using judged = freekv::cake;
#endif

auto use(const freekv::testing::eviction_definition& definition) {
  return freekv::testing::conforms<judged>(definition);
}
