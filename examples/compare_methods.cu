// compare_methods.cpp on a device.
#include "compare_methods.cpp"
