// A judge of an eviction that codes tokens, which attention then is not to as they were.
#include <freekv/freekv.hpp>
#include <freekv/testing/conforms.hpp>

#ifdef FREEKV_FIXED
using judged = freekv::h2o;
#else
using judged = freekv::mikv;
#endif

auto use(const freekv::testing::eviction_definition& definition) {
  return freekv::testing::conforms<judged>(definition);
}
