"""The C interface through ctypes, by the standard library alone: `ctypes_test.py LIBFREEKV C_API_H [LIBCUDART]`.

Decodes two sequences of which everything is within the budget, and compares with attention written here. The structs
below are held to the header's. With LIBCUDART on a device, keys and values in half; status 77 where there is none."""

import ctypes as c
import math
import random
import re
import struct
import sys

F32, F16, DECODE, PREFILL = 1, 2, 0, 1
LAYERS, QUERY_HEADS, KV_HEADS, D, PAGE = 2, 4, 2, 64, 16


class Sized(c.Structure):
    def __init__(self, **members):
        super().__init__(size=c.sizeof(self), **members)


class HostOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("threads", c.c_int32), ("no_overlap", c.c_int32)]


class CudaOptions(Sized):
    _fields_ = [("size", c.c_size_t), ("compute", c.c_void_p), ("recall", c.c_void_p), ("copy_engines", c.c_int32),
                ("reserved", c.c_int32)]


class Settings(Sized):
    _fields_ = [("size", c.c_size_t), ("method", c.c_char_p), ("element", c.c_int32), ("head_dim", c.c_int32),
                ("layers", c.c_int32), ("query_heads", c.c_int32), ("kv_heads", c.c_int32),
                ("page_tokens", c.c_int32), ("sink", c.c_int32), ("window", c.c_int32), ("selected_units", c.c_int32),
                ("max_tokens", c.c_int32), ("max_prompt", c.c_int32), ("max_sequences", c.c_int32),
                ("log_base", c.c_int32), ("scale", c.c_float)]  # an older one: of the others it has none


class StepInput(c.Structure):
    _fields_ = [("sequence", c.c_int32), ("tokens", c.c_int32), ("phase", c.c_int32)]


class Rows(Sized):  # an older one, as Attention is
    _fields_ = [("size", c.c_size_t), ("element", c.c_int32), ("rows", c.c_int32), ("keys", c.c_void_p),
                ("values", c.c_void_p), ("queries", c.POINTER(c.c_float))]


class Attention(Sized):
    _fields_ = [("size", c.c_size_t), ("rows", c.c_int32), ("out", c.POINTER(c.c_float)),
                ("lse", c.POINTER(c.c_float))]


class Report(Sized):
    _fields_ = [("size", c.c_size_t), ("corrected_heads", c.c_int32), ("attended", c.c_int32), ("recalled", c.c_int32),
                ("recalled_before_attention", c.c_int32), ("promoted", c.c_int32), ("slice_bytes", c.c_uint64)]


STRUCTS = {"freekv_host_options": HostOptions, "freekv_cuda_options": CudaOptions, "freekv_settings": Settings,
           "freekv_step_input": StepInput, "freekv_rows": Rows, "freekv_attention": Attention, "freekv_step_report": Report}


def check_structs(header):
    """Members in the header's order; of older structs the first ones."""
    for name, fields in STRUCTS.items():
        body = re.search(rf"typedef struct {name} {{(.*?)}} {name};", header, re.S)[1]
        body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
        members = [member for line in body.split(";") for member in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
        here = [field[0] for field in fields._fields_]
        assert members[:len(here)] == here, f"{name} has {members}, not {here}"
        assert fields in (Settings, Rows, Attention) or len(members) == len(here), name


class Library:
    def __init__(self, path):
        self.functions = c.CDLL(path)
        self.functions.freekv_last_message.restype = c.c_char_p
        for name in ("freekv_status_name", "freekv_method_name", "freekv_pipeline_name"):
            getattr(self.functions, name).restype = c.c_char_p
        self.functions.freekv_method_name.argtypes = [c.c_size_t]
        self.functions.freekv_pipeline_name.argtypes = [c.c_void_p]
        self.functions.freekv_method_count.restype = c.c_size_t

    def __getattr__(self, name):
        """A call that raises what the library says."""
        function = getattr(self.functions, "freekv_" + name)

        def call(*given):
            status = function(*given)
            if status != 0:
                raise RuntimeError(f"{self.functions.freekv_status_name(status).decode()}: "
                                   f"{self.functions.freekv_last_message().decode()}")

        return call


class Host:
    """Where rows lie, and how they are kept."""
    element, bytes, shape, tolerance = F32, 4, "f32 64", 1e-5
    rounded = staticmethod(lambda numbers: numbers)

    def create(self, lib, backend):
        lib.backend_create_host(c.byref(HostOptions(threads=2)), c.byref(backend))

    def floats(self, numbers):
        return (c.c_float * len(numbers))(*numbers)

    def give_back(self):
        pass


class Device:
    element, bytes, shape, tolerance = F16, 2, "f16 64", 1e-4

    def __init__(self, path):
        self.cuda, self.taken, devices = c.CDLL(path), [], c.c_int()
        if self.cuda.cudaGetDeviceCount(c.byref(devices)) != 0 or devices.value == 0:
            print("SKIPPED: no NVIDIA device is usable")
            sys.exit(77)

    def expect(self, status):
        assert status == 0, status

    @staticmethod
    def rounded(numbers):
        return struct.unpack(f"{len(numbers)}e", struct.pack(f"{len(numbers)}e", *numbers))

    def create(self, lib, backend):
        refused(lambda: lib.backend_create_cuda(c.byref(CudaOptions()), c.byref(backend)), "usage_error", "compute")
        streams = [c.c_void_p(), c.c_void_p()]
        for stream in streams:
            self.expect(self.cuda.cudaStreamCreateWithFlags(c.byref(stream), 1))  # which waits for no other
        lib.backend_create_cuda(c.byref(CudaOptions(compute=streams[0], recall=streams[1])), c.byref(backend))

    def floats(self, numbers):
        """Floats that the device reaches: page-locked."""
        memory = c.c_void_p()
        self.expect(self.cuda.cudaHostAlloc(c.byref(memory), c.c_size_t(4 * len(numbers)), 2))
        self.taken.append(memory)
        there = (c.c_float * len(numbers)).from_address(memory.value)
        there[:] = numbers
        return there

    def give_back(self):
        while self.taken:
            self.expect(self.cuda.cudaFreeHost(self.taken.pop()))


class Sequence:
    def __init__(self, number):
        self.number = number
        self.keys = [[] for _ in range(LAYERS)]  # by layer: rows of KV_HEADS * D
        self.values = [[] for _ in range(LAYERS)]

    def attention(self, layer, at, query):
        out = []
        for head in range(QUERY_HEADS):
            begin = head // (QUERY_HEADS // KV_HEADS) * D
            q = query[head * D:(head + 1) * D]
            scores = [sum(a * b for a, b in zip(q, k[begin:begin + D])) / math.sqrt(D)
                      for k in self.keys[layer][:at + 1]]
            weights = [math.exp(score) for score in scores]
            for i in range(D):
                weighted = sum(w * v[begin + i] for w, v in zip(weights, self.values[layer]))
                out.append(weighted / sum(weights))
        return out


def step(lib, on, pipeline, sequences, rows, phase, numbers):
    inputs = (StepInput * len(sequences))(*[StepInput(s.number, rows, phase) for s in sequences])
    all_rows = rows * len(sequences)
    handle = c.c_void_p()
    lib.begin_step(pipeline, inputs, c.c_size_t(len(sequences)), c.byref(handle))
    for layer in range(LAYERS):
        k = on.floats([numbers.uniform(-1, 1) for _ in range(all_rows * KV_HEADS * D)])
        v = on.floats([numbers.uniform(-1, 1) for _ in range(all_rows * KV_HEADS * D)])
        q = on.floats([numbers.uniform(-2, 2) for _ in range(all_rows * QUERY_HEADS * D)])
        out = on.floats([0.0] * (all_rows * QUERY_HEADS * D))
        for row in range(all_rows):
            of = sequences[row // rows]
            of.keys[layer].append(on.rounded(k[row * KV_HEADS * D:(row + 1) * KV_HEADS * D]))
            of.values[layer].append(on.rounded(v[row * KV_HEADS * D:(row + 1) * KV_HEADS * D]))
        lib.append(handle, layer, c.byref(Rows(element=F32, rows=all_rows, keys=c.addressof(k), values=c.addressof(v),
                                               queries=q)))
        if phase == DECODE:
            lib.attend(handle, layer, c.byref(Attention(rows=all_rows, out=out)))
            lib.synchronize(pipeline)
            for row, of in enumerate(sequences):
                expected = of.attention(layer, len(of.keys[layer]) - 1,
                                        q[row * QUERY_HEADS * D:(row + 1) * QUERY_HEADS * D])
                got = out[row * QUERY_HEADS * D:(row + 1) * QUERY_HEADS * D]
                far = max(abs(a - b) for a, b in zip(expected, got))
                assert far < on.tolerance, f"layer {layer}, row {row}: {far} from full attention"
    lib.end_step(handle)
    lib.synchronize(pipeline)
    on.give_back()


def refused(call, *parts):
    try:
        call()
    except RuntimeError as error:
        assert all(part in str(error) for part in parts), str(error)
        return
    raise AssertionError(f"nothing said {parts}")


def main(path, header, cudart=None):
    check_structs(open(header).read())
    on = Host() if cudart is None else Device(cudart)
    lib = Library(path)
    assert lib.functions.freekv_abi() == int(re.search(r"#define FREEKV_ABI (\d+)", open(header).read())[1])
    methods = [lib.functions.freekv_method_name(i).decode() for i in range(lib.functions.freekv_method_count())]
    assert "freekv" in methods and "h2o" in methods, methods

    backend, pipeline = c.c_void_p(), c.c_void_p()
    settings = Settings(method=b"freekv", element=on.element, head_dim=D, layers=LAYERS, query_heads=QUERY_HEADS,
                        kv_heads=KV_HEADS, page_tokens=PAGE, sink=PAGE, window=2 * PAGE, selected_units=4,
                        max_tokens=100, max_sequences=2)
    assert cudart is None or lib.functions.freekv_has_cuda() == 1
    on.create(lib, backend)
    lib.pipeline_create(backend, c.byref(settings), c.byref(pipeline))
    assert lib.functions.freekv_pipeline_name(pipeline).startswith(b"min_max, mean_softmax, top_k, cosine_drift(0.9)")
    numbers = random.Random(1)
    sequences = []
    for prompt in (70, 35):
        number = c.c_int32()
        lib.open(pipeline, c.byref(number))
        sequences.append(Sequence(number.value))
        step(lib, on, pipeline, sequences[-1:], prompt, PREFILL, numbers)
    for _ in range(6):
        step(lib, on, pipeline, sequences, 1, DECODE, numbers)
    report = Report()
    lib.report(pipeline, 1, sequences[0].number, c.byref(report))
    assert report.attended > 0 and report.slice_bytes == 2 * PAGE * D * on.bytes, (report.attended, report.slice_bytes)
    refused(lambda: lib.open(pipeline, c.byref(c.c_int32())), "pool_exhausted", "2 of 2 in use")
    refused(lambda: lib.release(pipeline, 7), "usage_error", "sequence 7")
    lib.pipeline_destroy(pipeline)
    settings.head_dim = 80
    refused(lambda: lib.pipeline_create(backend, c.byref(settings), c.byref(pipeline)), "settings_error",
            on.shape)
    lib.backend_destroy(backend)
    print(f"{lib.functions.freekv_version()}: {', '.join(methods)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
