// What a program says of a shape that it was not compiled for.

#include "pipeline.hpp"

#include "../catch.hpp"

namespace {

using freekv::examples::compiled_lists;
using freekv::examples::data_type;
using freekv::examples::sentence_of_missing;

}  // namespace

TEST_CASE("a shape that is not compiled in comes with the command that adds it", "[shapes]") {
  const compiled_lists one{"64", "half", "", "/some where/build"};
  CHECK(sentence_of_missing(data_type::f16, 128, one) ==
        "head_dim 128 of type half is not among the shapes compiled in (64 in FREEKV_HEAD_DIMS, half in "
        "FREEKV_ELEMENTS); add it: cmake '-DFREEKV_HEAD_DIMS=64;128' '-DFREEKV_ELEMENTS=half' '/some "
        "where/build' && "
        "cmake --build '/some where/build'");
  const auto adds = [](data_type element, int head_dim, const compiled_lists& lists,
                       const std::string& options) {
    CHECK_THAT(sentence_of_missing(element, head_dim, lists), Catch::Contains("cmake " + options + " '"));
  };
  adds(data_type::bf16, 64, one, "'-DFREEKV_HEAD_DIMS=64' '-DFREEKV_ELEMENTS=half;bfloat16'");
  adds(data_type::f32, 8, one,
       "'-DFREEKV_HEAD_DIMS=64;8' '-DFREEKV_ELEMENTS=half;float'");  // 64 has no 8 in it
  const compiled_lists some{"64;128", "float;bfloat16", "", "b"};
  adds(data_type::f16, 64, some, "'-DFREEKV_HEAD_DIMS=64;128' '-DFREEKV_ELEMENTS=float;bfloat16;half'");
  adds(data_type::bf16, 256, some, "'-DFREEKV_HEAD_DIMS=64;128;256' '-DFREEKV_ELEMENTS=float;bfloat16'");
  const compiled_lists fewer{"64;128", "float;half", "half", "b"};
  adds(data_type::f32, 128, fewer,
       "'-DFREEKV_HEAD_DIMS=64;128' '-DFREEKV_ELEMENTS=float;half' '-DFREEKV_OTHER_ELEMENTS='");
}

TEST_CASE("a head_dim that cannot be compiled comes with those that can", "[shapes]") {
  for (const int head_dim : {-8, 0, 4, 12, 100, 264, 8192}) {
    const std::string says = sentence_of_missing(data_type::f16, head_dim, {"64", "half", "", "b"});
    CHECK_THAT(says, Catch::StartsWith("head_dim " + std::to_string(head_dim) + " of type half"));
    CHECK_THAT(says, Catch::Contains("multiple of 8 from 8 to 256") && !Catch::Contains("cmake"));
  }
}

TEST_CASE("a type that no keys are kept as is refused before its head_dim", "[shapes]") {
  CHECK_THROWS_WITH(freekv::examples::check_compiled(data_type::i32, 64),
                    Catch::Contains("I32") && Catch::Contains("F32, F16 or BF16"));
}
