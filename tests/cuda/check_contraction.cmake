# Compiles SOURCE to PTX, once with nvcc's default flags and once so that it fuses no product with a sum: kernels are the same
# but for the marks of operations that are not fused. What is to be fused, or must not be, says so in the source.
foreach(fused true false)
  set(ptx ${OBJECT}.fmad_${fused}.ptx)
  execute_process(COMMAND ${COMPILER} -std=c++20 -ccbin ${HOST_COMPILER} -ptx -arch=compute_80 -fmad=${fused} -DHEAD_DIM=128
                          -I${INCLUDE} -o ${ptx} ${SOURCE}
                  RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(NOT status EQUAL 0)
    message(FATAL_ERROR "${SOURCE} does not compile:\n${output}")
  endif()
  execute_process(COMMAND sed -E -e "s/(add|sub|mul)[.]rn[.]f32/\\1.f32/" -e "/^[/][/]/d" ${ptx} OUTPUT_FILE ${ptx}.unmarked)
  file(SHA256 ${ptx}.unmarked of_${fused})
  file(STRINGS ${ptx} fmas REGEX "fma[.]rn[.]f32")
  list(LENGTH fmas fmas_${fused})
endforeach()
if(fmas_true LESS 100)
  message(FATAL_ERROR "${SOURCE} has ${fmas_true} fused multiply-adds: nothing is compared")
endif()
if(NOT of_true STREQUAL of_false)
  message(FATAL_ERROR "nvcc fuses what does not say so: ${fmas_true} fused multiply-adds by default, ${fmas_false} without its "
                      "fusing; `rounded_sum` or `fmaf` says which is meant")
endif()
