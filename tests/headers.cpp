// Nothing: it makes CMake compile the header that all tests start with.
