# Compile once what Horovod's build compiles once per framework. CMake reads this file right behind Horovod's project().
#
# Horovod puts 30 common files into the library of each framework and compiles them, and Gloo, for each library again. With
# today's frameworks both compilations are the same: C++17, one ABI, TensorFlow's Eigen. Here the common files become one set of
# objects that both libraries link, in a few large files ("unity"), as most of the time goes into the same headers. The
# frameworks' own files become objects as well: a library's files wait for what the library depends on, objects wait for nothing.
#
# Where that does not hold (CUDA or ROCm, which add files of their own; two ABIs; an old CMake) the build is Horovod's own.
if(CMAKE_VERSION VERSION_LESS 3.20)
    return()
endif()
cmake_language(DEFER CALL hvdtrain_compile_once)

# The files become an object library, compiled as LIBRARY, which stands in the folder DIRECTORY, compiles them.
function(hvdtrain_objects name library directory files)
    add_library(${name} OBJECT ${files})
    get_directory_property(flags DIRECTORY ${directory} DEFINITION CMAKE_CXX_FLAGS)
    get_directory_property(definitions DIRECTORY ${directory} COMPILE_DEFINITIONS)
    get_target_property(includes ${library} INCLUDE_DIRECTORIES)
    separate_arguments(flags)
    target_compile_options(${name} PRIVATE ${flags})
    target_compile_definitions(${name} PRIVATE ${definitions})
    target_include_directories(${name} SYSTEM PRIVATE ${includes})
    set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE ON)
endfunction()

function(hvdtrain_compile_once)
    if(HAVE_CUDA OR HAVE_SUB_PROJECT_CUDA OR HAVE_ROCM)
        return()
    endif()
    set(libraries)
    foreach(library pytorch tensorflow)
        if(TARGET ${library})
            list(APPEND libraries ${library})
        endif()
    endforeach()
    get_directory_property(torch_abi DIRECTORY horovod/torch DEFINITION Pytorch_CXX11)
    get_directory_property(tensorflow_abi DIRECTORY horovod/tensorflow DEFINITION Tensorflow_CXX11)
    if(TARGET pytorch AND TARGET tensorflow AND NOT "${torch_abi}" STREQUAL "${tensorflow_abi}")
        return()
    endif()

    # Compiled as the last one compiles it: TensorFlow's flags say how Eigen, which its own file includes as well, aligns.
    list(GET libraries -1 last)
    set(folder_of_pytorch horovod/torch)
    set(folder_of_tensorflow horovod/tensorflow)
    foreach(library ${libraries})
        get_target_property(own ${library} SOURCES)
        list(REMOVE_ITEM own ${SOURCES})
        hvdtrain_objects(objects_of_${library} ${library} ${folder_of_${library}} "${own}")
    endforeach()
    hvdtrain_objects(objects_of_both ${last} ${folder_of_${last}} "${SOURCES}")
    set_target_properties(objects_of_both PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    if(TARGET pytorch)
        set_target_properties(objects_of_pytorch PROPERTIES UNITY_BUILD ON)
    endif()
    foreach(library ${libraries})
        set_target_properties(${library} PROPERTIES
            SOURCES "$<TARGET_OBJECTS:objects_of_${library}>;$<TARGET_OBJECTS:objects_of_both>"
            LINKER_LANGUAGE CXX)
        # Without the path to this environment's frameworks the wheel fits any environment with these versions: Horovod
        # imports the framework before its own library, so that is found. The path to MPI stays.
        set_target_properties(${library} PROPERTIES SKIP_BUILD_RPATH ON)
        foreach(file ${MPI_LIBRARIES})
            get_filename_component(folder ${file} DIRECTORY)
            target_link_options(${library} PRIVATE "LINKER:-rpath,${folder}")
        endforeach()
    endforeach()

    if(TARGET gloo)
        set_target_properties(gloo PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 20)
        # Its helpers have the names of another file's.
        set_source_files_properties(${PROJECT_SOURCE_DIR}/third_party/gloo/gloo/allreduce.cc
            TARGET_DIRECTORY gloo PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
    if(TARGET compatible17_gloo)
        set_target_properties(compatible17_gloo PROPERTIES EXCLUDE_FROM_ALL ON)
        get_target_property(linked tensorflow LINK_LIBRARIES)
        list(TRANSFORM linked REPLACE "^compatible17_gloo$" gloo)
        set_target_properties(tensorflow PROPERTIES LINK_LIBRARIES "${linked}")
    endif()
endfunction()
