/* FreeKV for C11, C++ and foreign-function interfaces: what the library freekv::c (examples/c_library)
 * exports. docs/c.md has a program, and says how the library is built.
 *
 * Calls return a freekv_status and never throw. What a call does not change when it fails says
 * docs/engine.md, "When something fails". Calls have the names of the C++ interface, whose headers say more
 * about each.
 *
 * Structs. The first member of a struct is its `size`, as the caller's header has it: `{.size = sizeof
 * settings}`. Members that are 0 have their default. A smaller, older struct is taken as if what it lacks
 * were 0; a larger, newer one is refused, unless what it has more is 0. Of a struct that the library fills it
 * writes `size` bytes, and 0 to members that it does not know. freekv_step_input and freekv_engine_blocks
 * come in arrays: they have no size and do not grow.
 *
 * Threads. One thread at a time calls a backend, its pipeline, and that pipeline's step and prefixes; another
 * may go on where it has left off, as if it had passed a mutex on. Different backends are independent.
 * Functions that take none of these may be called by any thread at any time. freekv_last_message is the
 * calling thread's.
 *
 * What waits says docs/engine.md, "What an engine keeps to". On the host there are no streams: what append,
 * attend and table give is there when they return. On a device, calls of a step return when their work is
 * queued on the backend's streams; rows, outputs, tables of queue_tables and blocks are then in memory that
 * the device reads and writes (of cudaMalloc, cudaHostAlloc or the like), and stay as they are until the
 * compute stream has come so far. What waits there says docs/cuda.md, "What a call does". Streams are
 * cudaStream_t, as void*; no header of CUDA is needed here. Any call on a device may
 * return device_error. */
#ifndef FREEKV_C_API_H
#define FREEKV_C_API_H

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define FREEKV_API __attribute__((visibility("default")))
#else
#define FREEKV_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Number of this interface. It is another where a program compiled against an older header cannot go on;
 * functions and members that are added leave it as it is. */
#define FREEKV_ABI 1

/* Outcome of a call; the errors are those of the C++ interface. */
typedef enum freekv_status {
  FREEKV_OK = 0,
  FREEKV_SETTINGS_ERROR = 1,  /* settings contradict each other, a policy, or what is compiled in */
  FREEKV_USAGE_ERROR = 2,     /* an order of calls, or an argument, without a meaning: nothing has changed */
  FREEKV_POOL_EXHAUSTED = 3,  /* a pool of fixed capacity is too small: no sequence has changed */
  FREEKV_STORE_ERROR = 4,     /* the store's file: the call may be repeated, or the sequence abandoned */
  FREEKV_REPLAY_ERROR = 5,    /* captured steps were replayed out of order: the device does nothing since */
  FREEKV_DEVICE_ERROR = 6,    /* a call of the CUDA runtime or a launch, which the message names, failed */
  FREEKV_THREAD_ERROR = 7,    /* the system gives fewer threads than were asked for */
  FREEKV_OUT_OF_MEMORY = 8,   /* a memory resource has not enough: nothing has been made */
  FREEKV_UNEXPECTED_ERROR = 9 /* something else: an error of the library's own, worth a report */
} freekv_status;

/* Types of keys and values, and but for fp8 of queries and outputs. */
typedef enum freekv_element {
  FREEKV_F32 = 1,
  FREEKV_F16 = 2,
  FREEKV_BF16 = 3,
  FREEKV_FP8_E4M3 = 4 /* a byte, without infinity; of methods that retrieve */
} freekv_element;

/* Rows of a step: attended within the budget; or exact and causal. */
typedef enum freekv_phase { FREEKV_DECODE = 0, FREEKV_PREFILL = 1 } freekv_phase;

/* Selected pages are recalled into slots, or attended to in the store. */
typedef enum freekv_route { FREEKV_RESIDENT = 0, FREEKV_IN_PLACE = 1 } freekv_route;

/* Layers retrieve, keep everything, have sink and window alone, or a sliding window of the model's own. */
typedef enum freekv_layer_kind {
  FREEKV_LAYER_RETRIEVAL = 0,
  FREEKV_LAYER_COMPLETE = 1,
  FREEKV_LAYER_WINDOW = 2,
  FREEKV_LAYER_SLIDING = 3
} freekv_layer_kind;

/* Base of the log-sum-exp that attention returns. */
typedef enum freekv_log_base { FREEKV_LOG_E = 0, FREEKV_LOG_2 = 1 } freekv_log_base;

typedef struct freekv_backend freekv_backend;   /* threads, or the streams of a device */
typedef struct freekv_pipeline freekv_pipeline; /* the KV cache of all layers of a model */
typedef struct freekv_step freekv_step;         /* a pipeline's step in progress */
typedef struct freekv_prefix freekv_prefix;     /* pages that outlive their sequence */
typedef int32_t freekv_sequence;                /* number of a sequence, from freekv_open or freekv_fork */

/* ---- What the library is ---- */

/* FREEKV_ABI of the library's own header. A program compares it with its own before it calls anything else.
 */
FREEKV_API int32_t freekv_abi(void);
/* Version of FreeKV: 1000000 * major + 1000 * minor + patch. */
FREEKV_API int32_t freekv_version(void);

/* Shapes that are compiled in. A pipeline of another is a settings_error, whose message names these. */
FREEKV_API size_t freekv_shape_count(void);
/* Element (freekv_element) and numbers of a key of shape `index`. Usage_error from freekv_shape_count on. */
FREEKV_API freekv_status freekv_shape_at(size_t index, int32_t* element, int32_t* head_dim);

/* Methods that are compiled in, for each shape: names as programs and tables have them, as "freekv". */
FREEKV_API size_t freekv_method_count(void);
/* Name of method `index`, and what it does in a sentence; NULL from freekv_method_count on. */
FREEKV_API const char* freekv_method_name(size_t index);
FREEKV_API const char* freekv_method_about(size_t index);

/* Names, such as "bf16" and "pool_exhausted"; NULL for a number that is none. */
FREEKV_API const char* freekv_element_name(int32_t element);
FREEKV_API const char* freekv_status_name(int32_t status);

/* Message of the calling thread's last failed call, with numbers and a remedy; "" where none has failed. It
 * stays until the thread's next failure, and is cut behind 1023 bytes. */
FREEKV_API const char* freekv_last_message(void);

/* ---- Backend ---- */

typedef struct freekv_host_options {
  size_t size;
  int32_t threads;    /* that attend and append, the calling one included; 0: 1 */
  int32_t no_overlap; /* not 0: selects and recalls for the next step at once, not on a thread of its own */
} freekv_host_options;

/* Threads of the host, which serve one pipeline at a time. Settings_error, thread_error. */
FREEKV_API freekv_status freekv_backend_create_host(const freekv_host_options* options,
                                                    freekv_backend** backend);

/* Streams of the device that is current, which is current in all calls with this backend. Both are the
 * engine's own, may be the same, and neither is the legacy default stream (NULL). */
typedef struct freekv_cuda_options {
  size_t size;
  void* compute; /* cudaStream_t: orders what append and attend read and write */
  void* recall;  /* cudaStream_t: selection and recall for the next step */
  int32_t
      copy_engines; /* not 0: these recall in place of a kernel; the host waits then, and captures nothing */
  int32_t reserved; /* 0 */
} freekv_cuda_options;

/* 1 where the library is compiled for CUDA too, with -DFREEKV_C_CUDA=ON; else 0. */
FREEKV_API int32_t freekv_has_cuda(void);
/* Streams of a device, which serve one pipeline at a time and stay as long as the backend. Of the methods it
 * has those that retrieve, but for those that complete attention, sample or are corrected by shares of all
 * attention; a pipeline of another, or with a store_file, is a settings_error. Usage_error; device_error;
 * settings_error without freekv_has_cuda. */
FREEKV_API freekv_status freekv_backend_create_cuda(const freekv_cuda_options* options,
                                                    freekv_backend** backend);

/* Ends the threads; streams stay. Usage_error, and nothing happens, while a pipeline has them. NULL is taken.
 */
FREEKV_API freekv_status freekv_backend_destroy(freekv_backend* backend);

/* ---- Pipeline ---- */

/* Memory resource. `allocate` returns memory at a multiple of `alignment`, a power of two, or NULL where
 * there is not enough. `deallocate` gets back what it returned. Neither throws nor calls this library. */
typedef struct freekv_memory {
  size_t size;
  void* context;
  void* (*allocate)(void* context, size_t bytes, size_t alignment);
  void (*deallocate)(void* context, void* memory, size_t bytes, size_t alignment);
} freekv_memory;

/* Slots of a layer that are blocks of the engine's own paged KV tensor, of a device in its memory. Row t of
 * KV head h of block b is head_dim elements at `keys + b * block_stride + t * token_stride + h *
 * head_stride`, and so are its values; strides in elements. Layers without slots have no ids. */
typedef struct freekv_engine_blocks {
  void* keys;
  void* values;
  int64_t block_stride, token_stride, head_stride;
  const int32_t* ids; /* (count), all different: freekv_slots of the layer; in the host's memory */
  size_t count;
} freekv_engine_blocks;

/* Data of methods that learn: float32 of all layers and KV heads, as key_codebooks and subspace_basis of the
 * C++ interface have them. `data` stays as long as the pipeline; of a device it reads it. */
typedef struct freekv_key_codebooks {
  size_t size;
  int32_t layers, kv_heads, head_dim;
  int32_t mean_codes, mean_dims; /* bytes of a page's mean key, and numbers that each stands for */
  int32_t codes, dims;           /* the same of a token */
  const float* data;
} freekv_key_codebooks;
typedef struct freekv_subspace_basis {
  size_t size;
  int32_t layers, kv_heads, rank, head_dim;
  const float* data;
} freekv_subspace_basis;

/* Settings of a pipeline. What they point to may go when the call returns, but for the data of codebooks and
 * basis, blocks with their lists, and the contexts of memory. Of methods that forget, as "h2o", the budget is
 * sink, window and selected pages together, and members of the second half are 0. */
typedef struct freekv_settings {
  size_t size;
  const char* method; /* a name; NULL: "freekv" */
  int32_t element;    /* freekv_element of stored keys and values */
  int32_t head_dim;
  int32_t layers, query_heads, kv_heads;
  int32_t page_tokens;    /* 0: 32 */
  int32_t sink, window;   /* tokens, whole pages */
  int32_t selected_units; /* pages, of some methods pieces of pages; all three 0: 64, 128 and 10 */
  int32_t max_tokens;     /* of one sequence */
  int32_t max_prompt;     /* of methods that forget: a prompt's part of max_tokens; 0: as many beside them */
  int32_t max_sequences;  /* 0: 1 */
  int32_t log_base;       /* freekv_log_base */
  float scale;            /* of scores and attention; 0: 1 / sqrt(head_dim) */
  const freekv_memory*
      slow_memory; /* of the store; NULL: the heap; of a device page-locked, cudaHostAlloc's */
  const freekv_memory*
      fast_memory; /* of slots, summaries and state; NULL: the heap; of a device cudaMalloc's */

  /* Second half: of methods that retrieve. */
  int32_t max_resident;       /* sequences that have slots at a time; 0: all */
  int32_t max_decode_rows;    /* that a sequence brings to a step; 0: 1; more for speculative decoding */
  int64_t store_tokens;       /* of all sequences together; 0: max_tokens for each */
  int64_t selected_tokens;    /* that selected slots have room for together; 0: what all may select */
  int32_t route;              /* freekv_route */
  int32_t sliding_window;     /* tokens, of layers of kind FREEKV_LAYER_SLIDING */
  const int32_t* layer_kinds; /* (layers) of freekv_layer_kind; NULL: the method's own */
  const float* sink_logits;   /* (layers, query_heads): of a token without a value; NULL: none */
  float soft_cap;             /* attention's scores become soft_cap * tanh(score / soft_cap); 0: none */
  float tau;                  /* of methods that correct by cosine_drift; 0: the method's */
  float delta;                /* of methods that correct by mass_deficit or missing_share; 0: the method's */
  float top_p;                /* of methods that select by top_p; 0: the method's */
  int32_t store_direct;       /* not 0: the file is read and written past the page cache */
  const freekv_key_codebooks* codebooks; /* of methods with key_codes */
  const freekv_subspace_basis* basis;    /* of methods with key_subspace, key_clusters or key_signatures */
  const char* store_file; /* file of complete pages, or a folder for one without a name; NULL: none */
  const freekv_engine_blocks* blocks; /* (layers); NULL: slots are the pipeline's own */
  /* Units in which keys and values are stored: a key is its stored numbers times its scale, as a checkpoint's
   * k_scale and v_scale; above 0. `scale_count` of each: 1, layers, or layers * kv_heads; NULL: 1. */
  const float *key_scales, *value_scales;
  int32_t scale_count;
  int32_t reserved; /* 0 */
} freekv_settings;

/* Bytes of a pipeline. `slow` and `fast` are taken from the two resources, in one block each. */
typedef struct freekv_footprint {
  size_t size;
  uint64_t slow, fast;
  uint64_t store, file, complete, slots; /* parts, as memory_bytes has them */
  uint64_t summaries, codec, state, staging;
} freekv_footprint;

/* Bytes that a pipeline with these settings takes, with `blocks`, whose ids are there, none for slots; known
 * before anything is allocated. Settings_error. */
FREEKV_API freekv_status freekv_measure(freekv_backend* backend, const freekv_settings* settings,
                                        freekv_footprint* footprint);
/* Slots by layer: `slots` (layers) of all resident sequences, and so the ids of freekv_engine_blocks;
 * `per_sequence` (layers), the room that a table needs. Either may be NULL. 0 for layers without slots.
 * Settings_error. */
FREEKV_API freekv_status freekv_slots(freekv_backend* backend, const freekv_settings* settings,
                                      int64_t* slots, int32_t* per_sequence);

/* Takes all its memory at once; steps allocate nothing. Settings_error, store_error, out_of_memory;
 * usage_error where the backend has a pipeline. */
FREEKV_API freekv_status freekv_pipeline_create(freekv_backend* backend, const freekv_settings* settings,
                                                freekv_pipeline** pipeline);
/* Waits for what is queued. A step in progress is abandoned. Usage_error, and nothing happens, while it has a
 * prefix. NULL is taken. */
FREEKV_API freekv_status freekv_pipeline_destroy(freekv_pipeline* pipeline);

/* The method in words, with its values, as long as the pipeline; NULL for NULL. */
FREEKV_API const char* freekv_pipeline_name(const freekv_pipeline* pipeline);
/* Waits until everything queued has happened. */
FREEKV_API freekv_status freekv_synchronize(freekv_pipeline* pipeline);

/* ---- Sequences, between steps ---- */

/* A new, empty sequence. Pool_exhausted. */
FREEKV_API freekv_status freekv_open(freekv_pipeline* pipeline, freekv_sequence* sequence);
/* Ends a sequence; its pages go back to the pool. Usage_error. */
FREEKV_API freekv_status freekv_release(freekv_pipeline* pipeline, freekv_sequence sequence);
/* Length of a sequence, the rows of a step in progress included. Usage_error. */
FREEKV_API freekv_status freekv_tokens(freekv_pipeline* pipeline, freekv_sequence sequence, int32_t* tokens);
/* Pages that the store has left. Methods that forget have none. */
FREEKV_API freekv_status freekv_free_pages(freekv_pipeline* pipeline, int32_t* pages);

/* The calls from here to the next line are of methods that retrieve; of others each but freekv_fork is a
 * usage_error. On a device they are queued behind what is. */

/* A new sequence that goes on as `parent` would. Its pages are shared; methods that forget copy what they
 * keep. Pool_exhausted, usage_error. */
FREEKV_API freekv_status freekv_fork(freekv_pipeline* pipeline, freekv_sequence parent,
                                     freekv_sequence* sequence);
/* The sequence keeps its first `tokens` tokens, as after rejected rows of a draft. Usage_error. */
FREEKV_API freekv_status freekv_truncate(freekv_pipeline* pipeline, freekv_sequence sequence, int32_t tokens);
/* The sequence's slots go to others until it is restored; it takes no steps. Usage_error; restore
 * pool_exhausted. */
FREEKV_API freekv_status freekv_preempt(freekv_pipeline* pipeline, freekv_sequence sequence);
FREEKV_API freekv_status freekv_restore(freekv_pipeline* pipeline, freekv_sequence sequence);
/* The complete pages among a sequence's first `tokens` tokens, for others to begin with. They stay in use
 * until the prefix is destroyed, which is before the pipeline is. Usage_error. */
FREEKV_API freekv_status freekv_keep_prefix(freekv_pipeline* pipeline, freekv_sequence sequence,
                                            int32_t tokens, freekv_prefix** prefix);
/* A new sequence that begins with a prefix of the same pipeline. Pool_exhausted, usage_error. */
FREEKV_API freekv_status freekv_open_with(freekv_pipeline* pipeline, const freekv_prefix* prefix,
                                          freekv_sequence* sequence);
/* Gives the pages back. NULL is taken. */
FREEKV_API freekv_status freekv_prefix_destroy(freekv_prefix* prefix);

/* ---- Steps ---- */

/* Rows that a sequence brings to a step. */
typedef struct freekv_step_input {
  freekv_sequence sequence;
  int32_t tokens; /* prompt rows, any number; or decode rows, at most max_decode_rows */
  int32_t phase;  /* freekv_phase */
} freekv_step_input;

/* Keys, values and queries of a step's rows in a layer, after RoPE; sequences one behind the other, as
 * begin_step lists them. They stay where they are until the layer has attended. Rows may be parts of longer
 * ones, as of a fused projection: a stride is elements from a row to the next, 0 where one lies behind the
 * other. */
typedef struct freekv_rows {
  size_t size;
  int32_t element;       /* of keys and values: the stored one, in fp8 stored numbers; or FREEKV_F32, for fp8
                            FREEKV_F16 and FREEKV_BF16 too, which are divided by their scales and rounded */
  int32_t rows;          /* that there is room for, at least the step's; those behind them are not read */
  const void* keys;      /* (rows, kv_heads, head_dim) */
  const void* values;    /* (rows, kv_heads, head_dim) */
  const void* queries;   /* (rows, query_heads, head_dim); NULL: prompt rows that do not attend */
  int32_t query_element; /* FREEKV_F32, FREEKV_F16 or FREEKV_BF16; 0: FREEKV_F32 */
  int32_t reserved;      /* 0 */
  int64_t key_stride, value_stride, query_stride;
} freekv_rows;

/* Outputs of a step's rows in a layer. */
typedef struct freekv_attention {
  size_t size;
  int32_t rows;        /* that there is room for, at least the step's; those behind them are not written */
  void* out;           /* (rows, query_heads, head_dim) */
  float* lse;          /* (rows, query_heads): log-sum-exp in the settings' base; NULL: not asked for */
  int32_t out_element; /* FREEKV_F32, FREEKV_F16 or FREEKV_BF16; 0: FREEKV_F32 */
  int32_t reserved;    /* 0 */
  int64_t out_stride;  /* elements from a row to the next; 0: one lies behind the other */
} freekv_attention;

/* Block table of a sequence's last decode row: all pages are full but the last. */
typedef struct freekv_resident_table {
  size_t size;
  int32_t pages;  /* ids that were written */
  int32_t tokens; /* in these pages together */
} freekv_resident_table;

/* Starts a step to which the listed sequences bring rows: for each layer come append and attend, then
 * end_step. All that it needs is reserved here. `step` is the pipeline's one step, the same pointer each
 * time, and is not destroyed. Pool_exhausted, usage_error. */
FREEKV_API freekv_status freekv_begin_step(freekv_pipeline* pipeline, const freekv_step_input* entries,
                                           size_t count, freekv_step** step);
/* Appends the step's rows to a layer. Usage_error, store_error. */
FREEKV_API freekv_status freekv_append(freekv_step* step, int32_t layer, const freekv_rows* rows);
/* Corrects the heads that need it and attends; selection and recall for the next step go on behind it.
 * Usage_error, store_error. */
FREEKV_API freekv_status freekv_attend(freekv_step* step, int32_t layer, const freekv_attention* attention);

/* In place of attend, for an engine that attends with a kernel of its own to freekv_engine_blocks: correct,
 * then a table for each sequence with decode rows and the kernel, then finish_layer. Of methods that
 * retrieve. Usage_error; correct store_error. */
FREEKV_API freekv_status freekv_correct(freekv_step* step, int32_t layer);
/* Writes to `blocks`, which has room for `capacity`, at least the layer's freekv_slots per sequence: ids of
 * sink, selected and window pages, the open page last. `head` is a KV head, or -1 for one table of all, where
 * theirs are the same. */
FREEKV_API freekv_status freekv_table(freekv_step* step, int32_t layer, freekv_sequence sequence,
                                      int32_t head, int32_t* blocks, size_t capacity,
                                      freekv_resident_table* table);
FREEKV_API freekv_status freekv_finish_layer(freekv_step* step, int32_t layer);

/* Ends the step. All layers have been appended to, and have attended decode rows. Usage_error, and it goes
 * on. */
FREEKV_API freekv_status freekv_end_step(freekv_step* step);
/* Ends a step that cannot be finished, and releases the sequences that brought rows to it. Nothing happens
 * where none is in progress. */
FREEKV_API freekv_status freekv_abandon_step(freekv_step* step);
/* Takes one sequence out of the step and releases it; the step goes on for the others. Of methods that
 * retrieve. Usage_error. */
FREEKV_API freekv_status freekv_abandon_sequence(freekv_step* step, freekv_sequence sequence);

/* ---- Captured steps, of a device ---- */

/* A decode step of all layers is captured in a CUDA graph once, and launched for steps to come, whatever
 * sequences these have (docs/cuda.md, "A captured step"):
 *
 *     cudaStreamBeginCapture(compute, cudaStreamCaptureModeThreadLocal);
 *     freekv_begin_captured_step(pipeline, &most, &step);  // then append and attend for each layer
 *     freekv_end_step(step);
 *     cudaStreamEndCapture(compute, &graph);
 *     // Instantiated, and for each step:
 *     do freekv_plan(pipeline, entries, count, &planned); while (!planned && freekv_wait(pipeline) == 0);
 *     cudaGraphLaunch(replay, compute);
 *
 * On the host these calls are usage_errors, but for reserve. */

/* Bounds of a captured step. `entries` is at least 1; what else is 0 is what decode rows need. */
typedef struct freekv_step_bounds {
  size_t size;
  int32_t entries;  /* sequences at most */
  int32_t rows;     /* of all together; 0: max_decode_rows for each */
  int32_t pages;    /* that one sequence's rows write to */
  int32_t tokens;   /* of a sequence that has prompt rows, with these */
  int32_t prompts;  /* not 0: prompt rows are taken too */
  int32_t reserved; /* 0 */
} freekv_step_bounds;

/* Begins the capture of a step; the compute stream is captured. Rows and outputs have room for `most->rows`
 * rows, of which a replay reads and writes those of its step. Nothing happens to any sequence. end_step joins
 * the recall stream. Usage_error. */
FREEKV_API freekv_status freekv_begin_captured_step(freekv_pipeline* pipeline, const freekv_step_bounds* most,
                                                    freekv_step** step);
/* The host's half of the next replay: what happens to the sequences in a step. Exactly one launch of a graph
 * that is large enough follows, on the compute stream, before the next begin_step and before any sequence is
 * changed. `planned` becomes 1; or 0, and nothing has happened, while four steps are under way: freekv_wait
 * waits for one. Waits for nothing. Pool_exhausted, usage_error; replay_error for an earlier replay. */
FREEKV_API freekv_status freekv_plan(freekv_pipeline* pipeline, const freekv_step_input* entries,
                                     size_t count, int32_t* planned);
/* Waits until a step can be planned. Usage_error where no launch makes room; replay_error. */
FREEKV_API freekv_status freekv_wait(freekv_pipeline* pipeline);
/* Sees to it that decode rows of these sequences find slots for what they select, with selected_tokens, which
 * plan does not; may wait for what is queued. Pool_exhausted, usage_error. */
FREEKV_API freekv_status freekv_reserve(freekv_pipeline* pipeline, const freekv_step_input* entries,
                                        size_t count);

/* ---- Block tables in a device's memory ---- */

/* Rows of tables, of a batch of `sequences`: the step's in order, and empty rows behind them. */
typedef enum freekv_table_rows {
  FREEKV_BY_HEAD = 0,  /* (kv_heads, sequences): what a KV head attends to */
  FREEKV_FOLDED = 1,   /* (sequences, kv_heads), with ids block * kv_heads + head */
  FREEKV_ALL_HEADS = 2 /* (sequences): every page that some KV head attends to; of the store alone */
} freekv_table_rows;

/* Tables in memory of the device, written in place; what is NULL is not asked for. Blocks are in the order of
 * their tokens, all of them full but the last: pages by their numbers in freekv_paged_kv or, with
 * block_tokens, as many rows of token_stride elements from the first key and value on. */
typedef struct freekv_block_tables {
  size_t size;
  int32_t rows;           /* freekv_table_rows */
  int32_t sequences;      /* of the batch, at least the step's */
  int32_t max_blocks;     /* of a row, at least freekv_most_blocks */
  int32_t block_tokens;   /* of a block, a divisor of a page's tokens or a unit's; 0: a page's */
  int32_t* blocks;        /* (rows, max_blocks); -1 behind a row's */
  int32_t* seq_lens;      /* (rows): tokens in a row's blocks */
  int32_t* block_counts;  /* (rows) */
  int32_t* indptr;        /* (rows + 1): where a row's blocks begin in `indices` */
  int32_t* indices;       /* (rows * max_blocks), with `indptr` */
  int32_t* last_page_len; /* (rows): tokens in a row's last block; 0 where it has none */
} freekv_block_tables;

/* In place of freekv_table, between correct and finish_layer or attend, and in a captured step too: queues on
 * the compute stream that tables of what the step's decode rows attend to are written. Usage_error. */
FREEKV_API freekv_status freekv_queue_tables(freekv_step* step, int32_t layer,
                                             const freekv_block_tables* tables);
/* Blocks of `block_tokens` tokens, or pages where that is 0, that a row of a layer's tables has at most.
 * Usage_error for rows or blocks that the layer has no table of. */
FREEKV_API freekv_status freekv_most_blocks(freekv_pipeline* pipeline, int32_t layer, int32_t rows,
                                            int32_t block_tokens, int32_t* blocks);
/* Tensors whose blocks a layer's tables list, without ids. The engine does not write there. Usage_error. */
FREEKV_API freekv_status freekv_paged_kv(freekv_pipeline* pipeline, int32_t layer, freekv_engine_blocks* kv);

/* ---- Reports ---- */

/* Report of what a layer's last step did for a sequence, over all its KV heads. A slice is one head's keys
 * and values of a unit. */
typedef struct freekv_step_report {
  size_t size;
  int32_t corrected_heads;           /* heads that selected anew before they attended */
  int32_t attended;                  /* units attended as selected; of methods that forget, kept */
  int32_t recalled;                  /* slices copied from the store, for this step or the next */
  int32_t recalled_before_attention; /* those of them that attention waited for */
  int32_t promoted;                  /* slices copied from the window's slots */
  uint64_t slice_bytes;              /* of one slice; recalled * slice_bytes came from the
                                        store, less where units of a page share a read of its file */
} freekv_step_report;

/* Waits for the layer's recall; on a device for both streams, from which it reads back. Usage_error. */
FREEKV_API freekv_status freekv_report(freekv_pipeline* pipeline, int32_t layer, freekv_sequence sequence,
                                       freekv_step_report* report);

#ifdef __cplusplus
}
#endif

#endif
