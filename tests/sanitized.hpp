// Whether the test runs under a sanitizer: ten times slower, so that what is long there is shorter.
#pragma once

namespace tests {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool sanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool sanitized = true;
#else
inline constexpr bool sanitized = false;
#endif
#else
inline constexpr bool sanitized = false;
#endif

/// How many of so many random cases are tried: a third under a sanitizer.
template <class Count>
constexpr Count some_of(Count cases) {
  return sanitized ? (cases + 2) / 3 : cases;
}

}  // namespace tests
