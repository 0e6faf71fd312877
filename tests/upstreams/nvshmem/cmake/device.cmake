# compile_device_object(SOURCE OBJECT HEADERS): relocatable device code for every architecture asked for.
function(compile_device_object source object headers)
  get_filename_component(name ${object} NAME)
  add_custom_command(
    OUTPUT ${object}
    COMMAND ${CMAKE_CUDA_COMPILER} -dc -O3 -std=c++17 -Xcompiler -fPIC ${STANDIN_GENCODE} -I${headers} ${source}
            -o ${object}
    DEPENDS ${source} ${headers}/nvshmem_version.h
    COMMENT "Compiling CUDA object ${name}"
    VERBATIM)
endfunction()
