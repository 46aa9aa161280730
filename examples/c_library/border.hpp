// The border of the C interface: no exception passes it, and structs are as large as the caller says.
#pragma once

#include <freekv/c_api.h>

#include <algorithm>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <freekv/core/error.hpp>
#if defined(FREEKV_C_CUDA)
#include <freekv/backend/cuda/runtime.cuh>
#endif
#include <new>
#include <string>

namespace freekv::c_library {

/// The calling thread's last message. Of fixed size, so that keeping one cannot fail.
inline char* last_message() noexcept {
  static thread_local char text[1024] = "";
  return text;
}

inline freekv_status failed(freekv_status status, const char* message) noexcept {
  std::snprintf(last_message(), 1024, "%s", message);
  return status;
}

/// The status of the exception that is being handled, whose message is kept.
inline freekv_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const settings_error& e) {
    return failed(FREEKV_SETTINGS_ERROR, e.what());
  } catch (const usage_error& e) {
    return failed(FREEKV_USAGE_ERROR, e.what());
  } catch (const pool_exhausted& e) {
    return failed(FREEKV_POOL_EXHAUSTED, e.what());
  } catch (const store_error& e) {
    return failed(FREEKV_STORE_ERROR, e.what());
  } catch (const thread_error& e) {
    return failed(FREEKV_THREAD_ERROR, e.what());
#if defined(FREEKV_C_CUDA)
  } catch (const replay_error& e) {
    return failed(FREEKV_REPLAY_ERROR, e.what());
  } catch (const device_error& e) {
    return failed(FREEKV_DEVICE_ERROR, e.what());
#endif
  } catch (const std::bad_alloc&) {
    return failed(FREEKV_OUT_OF_MEMORY, "out of memory: a memory resource, or the heap, has not enough");
  } catch (const std::exception& e) {
    return failed(FREEKV_UNEXPECTED_ERROR, e.what());
  } catch (...) {
    return failed(FREEKV_UNEXPECTED_ERROR, "an exception that is no std::exception");
  }
}

/// Status of `call`.
template <class Call>
freekv_status guarded(const Call& call) noexcept {
  try {
    call();
    return FREEKV_OK;
  } catch (...) {
    return status_of_exception();
  }
}

/// Throws usage_error where `pointer` is null; `what` it should be: "open: pipeline".
template <class T>
T& required(T* pointer, const char* what) {
  if (pointer == nullptr) throw usage_error(std::string(what) + " is NULL");
  return *pointer;
}

/// Bytes that the caller's struct has. Throws usage_error for a size that no version of a struct has.
template <class Struct>
std::size_t size_of(const Struct* given, const char* what) {
  const std::size_t size = required(given, what).size;
  constexpr std::size_t most = 4096;
  if (size < sizeof size || size > most)
    throw usage_error(std::string(what) + " has size " + std::to_string(size) +
                      "; set it to the sizeof of its struct");
  return size;
}

/// The caller's struct, as large as this version's: what it lacks is 0. Throws usage_error where it has more
/// that is not 0.
template <class Struct>
Struct taken(const Struct* given, const char* what) {
  const std::size_t size = size_of(given, what);
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  for (std::size_t i = sizeof(Struct); i < size; ++i)
    if (bytes[i] != 0)
      throw usage_error(std::string(what) + " has " + std::to_string(size) +
                        " bytes, of which this library knows " + std::to_string(sizeof(Struct)) +
                        ", and the others are not 0; link a newer one");
  Struct whole{};
  std::memcpy(&whole, given, std::min(size, sizeof whole));
  whole.size = sizeof whole;
  return whole;
}

/// Writes a result to the caller's struct, as much as that holds; what it has more becomes 0.
template <class Struct>
void give(const Struct& result, Struct* to, std::size_t size) {
  std::memset(reinterpret_cast<unsigned char*>(to) + sizeof size, 0, size - sizeof size);
  std::memcpy(to, &result, std::min(size, sizeof result));
  to->size = size;
}

}  // namespace freekv::c_library
