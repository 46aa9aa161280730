// A format for a summary whose units are laid out by its data.
#include <freekv/freekv.hpp>

#ifdef FREEKV_FIXED
using choice = freekv::stored_as<freekv::mean, freekv::number_format::int8>;
#else
using choice = freekv::stored_as<freekv::key_signatures<10, 150>, freekv::number_format::int8>;
#endif

int main() { return static_cast<int>(choice{}.bytes<float>({8, 64})); }
