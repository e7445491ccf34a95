# TensorRT plugin library, built where TensorRT's public headers are: -DTENSORRT_INCLUDE_DIR=..., the compiler's default
# path, or a checkout of the public TensorRT repository (its include/). It links no TensorRT library: one binary serves
# 10.3 and later, and 11.
find_path(TENSORRT_INCLUDE_DIR NvInferRuntime.h DOC "Folder that holds NvInferRuntime.h")
if(NOT TENSORRT_INCLUDE_DIR)
  message(STATUS "replayssm: no TensorRT headers (set TENSORRT_INCLUDE_DIR): the plugin library is left out")
  return()
endif()
message(STATUS "replayssm: TensorRT headers in ${TENSORRT_INCLUDE_DIR}")

add_library(trtllm_replayssm_plugins SHARED trt/experts.cpp trt/log.cpp trt/registry.cpp trt/replay.cpp)
target_include_directories(trtllm_replayssm_plugins PRIVATE . ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
# TensorRT's own headers warn about what they deprecate.
target_include_directories(trtllm_replayssm_plugins SYSTEM PRIVATE ${TENSORRT_INCLUDE_DIR})
target_compile_options(trtllm_replayssm_plugins PRIVATE -Wall -Wextra -Werror)
target_link_libraries(trtllm_replayssm_plugins PRIVATE ${KERNEL_OBJECTS})
target_link_options(trtllm_replayssm_plugins PRIVATE -Wl,-Bsymbolic)
set_target_properties(trtllm_replayssm_plugins PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CUDA)
