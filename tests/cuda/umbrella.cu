// Every header in a source that nvcc compiles. The host's pipeline itself is instantiated where a host
// compiler is: its team's packs are vector types, which nvcc refuses in functions of both sides.
#include <freekv/freekv.hpp>

static_assert(freekv::summary_policy<freekv::key_subspace<>> && freekv::team<freekv::scalar_team>);
