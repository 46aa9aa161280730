// Structs of the C interface that say their size, and are 0 else.
#pragma once

template <class Struct>
Struct sized() {
  Struct s{};
  s.size = sizeof s;
  return s;
}
