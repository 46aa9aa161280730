/* What the C and C++17 tests of the C interface check with. */
#ifndef C_TEST_H
#define C_TEST_H

#include <freekv/c_api.h>
#include <stdio.h>
#include <string.h>

static int checks, failures;

static int check_that(int holds, const char* what, int line) {
  ++checks;
  if (holds) return 1;
  ++failures;
  fprintf(stderr, "line %d: %s\n  last message: %s\n", line, what, freekv_last_message());
  return 0;
}
#define CHECK(...) check_that(!!(__VA_ARGS__), #__VA_ARGS__, __LINE__)
#define OK(call) CHECK((call) == FREEKV_OK)

/* Whether the last message has all of `parts`, a list that NULL ends. */
static inline int says(const char* const* parts) {
  for (; *parts != NULL; ++parts)
    if (strstr(freekv_last_message(), *parts) == NULL) return 0;
  return 1;
}
#define SAYS(...) says((const char* const[]){__VA_ARGS__, NULL})

/* The exit status. */
static int finished(void) {
  printf("%d checks, %d failed\n", checks, failures);
  return failures == 0 && checks > 0 ? 0 : 1;
}

#endif
