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
 * attend and table give is there when they return. */
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
  FREEKV_REPLAY_ERROR = 5,    /* of a device alone, which this version has not */
  FREEKV_DEVICE_ERROR = 6,    /* the same */
  FREEKV_THREAD_ERROR = 7,    /* the system gives fewer threads than were asked for */
  FREEKV_OUT_OF_MEMORY = 8,   /* a memory resource has not enough: nothing has been made */
  FREEKV_UNEXPECTED_ERROR = 9 /* something else: an error of the library's own, worth a report */
} freekv_status;

/* Types of keys and values, and of the queries and outputs of methods that retrieve. */
typedef enum freekv_element { FREEKV_F32 = 1, FREEKV_F16 = 2, FREEKV_BF16 = 3 } freekv_element;

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

typedef struct freekv_backend freekv_backend;   /* threads */
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
/* Ends the threads. Usage_error, and nothing happens, while a pipeline has them. NULL is taken. */
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

/* Slots of a layer that are blocks of the engine's own paged KV tensor. Row t of KV head h of block b is
 * head_dim elements at `keys + b * block_stride + t * token_stride + h * head_stride`, and so are its values;
 * strides in elements. Layers without slots have no ids. */
typedef struct freekv_engine_blocks {
  void* keys;
  void* values;
  int64_t block_stride, token_stride, head_stride;
  const int32_t* ids; /* (count), all different: freekv_slots of the layer */
  size_t count;
} freekv_engine_blocks;

/* Data of methods that learn: float32 of all layers and KV heads, as key_codebooks and subspace_basis of the
 * C++ interface have them. `data` stays as long as the pipeline. */
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
  const freekv_memory* slow_memory; /* of the store; NULL: the heap */
  const freekv_memory* fast_memory; /* of slots, summaries and state; NULL: the heap */

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
} freekv_settings;

/* Bytes of a pipeline. `slow` and `fast` are taken from the two resources, in one block each. */
typedef struct freekv_footprint {
  size_t size;
  uint64_t slow, fast;
  uint64_t store, file, complete, slots; /* parts, as memory_bytes has them */
  uint64_t summaries, codec, state, staging;
} freekv_footprint;

/* Bytes that a pipeline with these settings takes, known before anything is allocated. Settings_error. */
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

/* The calls from here to the next line are of methods that retrieve; of others each is a usage_error. */

/* A new sequence that goes on as `parent` would. Its pages are shared. Pool_exhausted, usage_error. */
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
 * begin_step lists them. They stay where they are until the layer has attended. Rows of methods that retrieve
 * may be parts of longer ones, as of a fused projection: a stride is elements from a row to the next, 0 where
 * one lies behind the other. */
typedef struct freekv_rows {
  size_t size;
  int32_t element;       /* of keys and values: the stored one, or FREEKV_F32, which is rounded */
  int32_t rows;          /* that there is room for, at least the step's; those behind them are not read */
  const void* keys;      /* (rows, kv_heads, head_dim) */
  const void* values;    /* (rows, kv_heads, head_dim) */
  const void* queries;   /* (rows, query_heads, head_dim); NULL: prompt rows that do not attend */
  int32_t query_element; /* any freekv_element; 0: FREEKV_F32 */
  int32_t reserved;      /* 0 */
  int64_t key_stride, value_stride, query_stride;
} freekv_rows;

/* Outputs of a step's rows in a layer. */
typedef struct freekv_attention {
  size_t size;
  int32_t rows;        /* that there is room for, at least the step's; those behind them are not written */
  void* out;           /* (rows, query_heads, head_dim) */
  float* lse;          /* (rows, query_heads): log-sum-exp in the settings' base; NULL: not asked for */
  int32_t out_element; /* any freekv_element; 0: FREEKV_F32 */
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
  uint64_t slice_bytes;              /* of one slice; recalled * slice_bytes came from the store */
} freekv_step_report;

/* Waits for the layer's recall. Usage_error. */
FREEKV_API freekv_status freekv_report(freekv_pipeline* pipeline, int32_t layer, freekv_sequence sequence,
                                       freekv_step_report* report);

#ifdef __cplusplus
}
#endif

#endif
