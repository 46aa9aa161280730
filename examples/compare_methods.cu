// compare_methods.cpp on a device.
#include <freekv/freekv.cuh>

#include "compare_methods.cpp"
