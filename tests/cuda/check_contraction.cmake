# Compiles SOURCE to PTX so that nvcc fuses no product with a sum, beside FUSED, PTX of it with nvcc's default flags: kernels
# are the same but for the marks of operations that are not fused. What is to be fused, or must not be, says so in the source.
set(ptx_true ${FUSED})
set(ptx_false ${OBJECT}.fmad_false.ptx)
execute_process(COMMAND ${COMPILER} -std=c++20 -ccbin ${HOST_COMPILER} -ptx -arch=compute_80 -fmad=false -DHEAD_DIM=128
                        -I${INCLUDE} -o ${ptx_false} ${SOURCE}
                RESULT_VARIABLE status OUTPUT_VARIABLE output ERROR_VARIABLE output)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "${SOURCE} does not compile:\n${output}")
endif()
foreach(fused true false)
  set(ptx ${ptx_${fused}})
  execute_process(COMMAND sed -E -e "s/(add|sub|mul)[.]rn[.]f32/\\1.f32/" -e "/^[/][/]/d" ${ptx} OUTPUT_FILE ${OBJECT}.unmarked_${fused})
  file(SHA256 ${OBJECT}.unmarked_${fused} of_${fused})
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
