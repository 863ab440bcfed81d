# Decides whether the CUDA backend is built: sets STROBE_BUILT_WITH_CUDA (true or false) and prints one line with the reason.
# AUTO never stops a CPU build; ON stops when there is no usable toolkit. CMAKE_CUDA_ARCHITECTURES chooses other GPUs.
if(NOT STROBE_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "strobe: STROBE_CUDA=${STROBE_CUDA} given, expected AUTO, ON or OFF")
endif()
set(STROBE_BUILT_WITH_CUDA false)
set(reason "off by STROBE_CUDA=OFF")
if(NOT STROBE_CUDA STREQUAL "OFF")
  set(usable FALSE)
  find_program(STROBE_NVCC nvcc PATHS ENV CUDA_PATH ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT STROBE_NVCC)
    set(reason "no nvcc found; install the CUDA Toolkit, 12.4 or newer")
  else()
    execute_process(COMMAND ${STROBE_NVCC} --version OUTPUT_VARIABLE nvcc_says ERROR_QUIET RESULT_VARIABLE nvcc_status)
    string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" ignored "${nvcc_says}")
    set(nvcc_version "${CMAKE_MATCH_1}")
    if(nvcc_status OR NOT nvcc_version)
      set(reason "${STROBE_NVCC} does not run")
    elseif(nvcc_version VERSION_LESS 12.4)
      set(reason "nvcc ${nvcc_version} is too old; install the CUDA Toolkit, 12.4 or newer")
    else()
      set(probe ${PROJECT_BINARY_DIR}/cuda_probe)
      file(WRITE ${probe}/probe.cu "#include <cuda_runtime.h>\n__global__ void probe() {}\nint main() { probe<<<1, 1>>>(); }\n")
      execute_process(COMMAND ${STROBE_NVCC} -std=c++20 -arch=sm_80 -ccbin ${CMAKE_CXX_COMPILER} -o ${probe}/probe
                              ${probe}/probe.cu
                      RESULT_VARIABLE probe_status OUTPUT_QUIET ERROR_QUIET)
      if(probe_status)
        set(reason "nvcc ${nvcc_version} cannot build a test program with ${CMAKE_CXX_COMPILER}")
      else()
        get_filename_component(toolkit ${STROBE_NVCC} REALPATH)
        get_filename_component(toolkit ${toolkit} DIRECTORY)
        set(CUDAToolkit_ROOT ${toolkit}/..)
        find_package(CUDAToolkit QUIET)
        if(TARGET CUDA::cublasLt AND TARGET CUDA::cudart_static)
          set(usable TRUE)
          set(reason "nvcc ${nvcc_version} works")
        else()
          set(reason "nvcc ${nvcc_version} works, but its toolkit has no cuBLASLt; install the cuBLAS development files")
        endif()
      endif()
    endif()
  endif()
  if(STROBE_CUDA STREQUAL "ON" AND NOT usable)
    message(FATAL_ERROR "strobe: STROBE_CUDA=ON, but ${reason}")
  endif()
  if(usable AND STROBE_CUDA_SOURCES)
    set(STROBE_BUILT_WITH_CUDA true)
  elseif(usable)
    string(APPEND reason ", but this version has no CUDA kernels yet")
  endif()
endif()
if(STROBE_BUILT_WITH_CUDA)
  # Machine code for the A100 and its relatives and for Hopper with its own instructions; the driver translates the
  # portable code for all others, from sm_75 on.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
    set(CMAKE_CUDA_ARCHITECTURES 75-virtual 80 90a-real)
  endif()
  if(NOT DEFINED CMAKE_CUDA_HOST_COMPILER)
    set(CMAKE_CUDA_HOST_COMPILER ${CMAKE_CXX_COMPILER})
  endif()
  set(CMAKE_CUDA_COMPILER ${STROBE_NVCC} CACHE FILEPATH "")
  enable_language(CUDA)
  message(STATUS "strobe: CUDA backend yes (${reason}), for ${CMAKE_CUDA_ARCHITECTURES}")
else()
  message(STATUS "strobe: CUDA backend no (${reason})")
endif()

# Options for the CUDA sources of a target.
function(strobe_cuda_options target)
  # CMake 3.25 does not know that nvcc speaks C++20. What nvcc hands to the host compiler does not pass -Wpedantic.
  target_compile_options(
    ${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:-std=c++20;--expt-relaxed-constexpr;--extended-lambda;--Werror=all-warnings;--compiler-options=-Wall,-Wextra,-Werror,-Wno-unknown-pragmas>")
endfunction()

# Adds the CUDA kernels to a library.
function(strobe_add_cuda library)
  if(NOT STROBE_BUILT_WITH_CUDA)
    return()
  endif()
  target_sources(${library} PRIVATE ${STROBE_CUDA_SOURCES})
  strobe_cuda_options(${library})
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --help OUTPUT_VARIABLE nvcc_help ERROR_QUIET)
  if(nvcc_help MATCHES "--compress-mode")  # machine code in a third of the bytes
    target_compile_options(${library} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  if(CMAKE_CUDA_ARCHITECTURES MATCHES "90a")
    set(hopper_sources ${PROJECT_SOURCE_DIR}/kernels/cuda/attention_hopper.cu
                       ${PROJECT_SOURCE_DIR}/kernels/cuda/attention_hopper_forward.cu
                       ${PROJECT_SOURCE_DIR}/kernels/cuda/attention_hopper_backward.cu)
    set_source_files_properties(${hopper_sources} TARGET_DIRECTORY ${library} PROPERTIES COMPILE_DEFINITIONS
                                                                                         STROBE_CUDA_HOPPER)
    # What makes these kernels slow stops the build: spills (a warning, thus an error) and serialized products. Older
    # compilers cannot avoid them, and what they build is slower but right.
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13.0)
      set_source_files_properties(${hopper_sources} TARGET_DIRECTORY ${library} PROPERTIES COMPILE_OPTIONS
                                                                                           -Xptxas=-warn-spills)
      set_property(TARGET ${library} PROPERTY CUDA_COMPILER_LAUNCHER
                                              ${PROJECT_SOURCE_DIR}/kernels/cuda/refuse_serialized.sh
                                              ${CMAKE_CUDA_COMPILER_LAUNCHER})
    endif()
  endif()
  target_link_libraries(${library} PRIVATE CUDA::cudart_static CUDA::cublasLt)
endfunction()
