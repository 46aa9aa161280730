// Every policy of the programs, chosen at run time, for one shape: what a program compiles for each shape.
#include "pipeline_of_shape.hpp"

namespace freekv::examples {
template std::unique_ptr<pipeline> make_pipeline_of<kv_shape<bfloat16, 128>>(const pipeline_options&,
                                                                             host_backend&);
}
