# Compiles SOURCE twice. With FREEKV_FIXED defined it must compile without a warning, so that what is tested is the
# mistake and nothing else; without it, it must not, and SENTENCE must stand in the first of at most 3 errors.
#
# Without a SOURCE it makes HEADER, the whole library, and precompiles it, which most of the time of either compilation
# went into.
set(ENV{LC_ALL} C)
set(compile ${COMPILER} -std=c++20 -Wall -Wextra -Werror -I${INCLUDE})
foreach(folder ${CUDA_INCLUDE})
  list(APPEND compile -isystem ${folder})
endforeach()
if(NOT SOURCE)
  file(WRITE ${HEADER} "#include <freekv/freekv.hpp>\n")
  execute_process(COMMAND ${compile} -x c++-header ${HEADER} -o ${HEADER}.gch COMMAND_ERROR_IS_FATAL ANY)
  return()
endif()

list(APPEND compile -fsyntax-only)
if(COMPILER MATCHES "clang")
  list(APPEND compile -include-pch ${HEADER}.gch)
else()
  list(APPEND compile -Winvalid-pch -include ${HEADER})
endif()

execute_process(COMMAND ${compile} -DFREEKV_FIXED ${SOURCE} RESULT_VARIABLE status ERROR_VARIABLE output)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "Does not compile without the mistake either:\n${output}")
endif()

execute_process(COMMAND ${compile} ${SOURCE} RESULT_VARIABLE status ERROR_VARIABLE output)
if(status EQUAL 0)
  message(FATAL_ERROR "Compiles in spite of the mistake; expected: ${SENTENCE}")
endif()
string(REGEX MATCH "error: [^\n]*" first "${output}")
string(FIND "${first}" "${SENTENCE}" position)
if(position EQUAL -1)
  message(FATAL_ERROR "The first error does not say: ${SENTENCE}\n${output}")
endif()
string(REGEX MATCHALL "error: " errors "${output}")
list(LENGTH errors count)
if(count GREATER 3)
  message(FATAL_ERROR "The sentence is followed by ${count} errors, more than 3:\n${output}")
endif()
