"""What `make test` leaves to `make test-all`.

`make test` takes 5 to 15 minutes on two cores and shows every version, every
feature, forward, backward, what the compiler makes of them, and the models. So these tests are left
out: each took seconds of processor time, and tests that stay show most of what it shows. A name
is that of a file or of a function in it. Two rules come before the names: of the
architectures, `make test` compiles for sm_90 only, and there FA3's kernels only, the explicit ones
and what they leave to others; and what bfloat16 shows it does not repeat for float16.
"""

import re

import pytest

SLOW = [
    "benchmarks/tests/attention/test_aoti.py::test_packages_load_and_say_what_the_models_say",
    "benchmarks/tests/test_generate_speed.py::test_all_contestants_say_the_same",
    "benchmarks/tests/test_parallel.py",
    "benchmarks/tests/test_training.py",
    "benchmarks/tests/test_training_step.py::test_contestants_learn_alike",
    "compile/test_blackwell_compile.py",
    "compile/test_compile.py::test_fa2_needs_three_kernels_for_the_gradients_and_fa1_one",
    "compile/test_compile.py::test_split_launches_the_reduction",
    "compile/test_fa4_compile.py",
    "compile/test_gemm_compile.py",
    "compile/test_q_in_registers.py",
    "compile/test_rmsnorm_gemm_compile.py",
    "documents/notebooks/test_lessons.py::test_a_changed_line_is_compiled",
    "documents/notebooks/test_lessons.py::test_instructions_are_those_of_the_architecture",
    "documents/notebooks/test_lessons.py::test_recording_changes_no_bit",
    "documents/notebooks/test_modelled.py::test_no_unit_is_busy_for_longer_than_the_run",
    "documents/notebooks/test_modelled.py::test_nothing_but_products_takes_time",
    "documents/notebooks/test_notebooks.py",
    "documents/notebooks/test_pictures.py",
    "documents/pages/test_add_a_version.py",
    "documents/pages/test_your_data.py",
    "documents/site/test_docs.py",
    "documents/site/test_stepper.py::test_a_reader_steps",
    "documents/site/test_stepper.py::test_links_name_a_moment",
    "documents/site/test_stepper.py::test_nothing_is_cut_off",
    "documents/site/test_stepper.py::test_two_versions_go_by_the_work_done",
    "flash_versions/dispatch/test_interpreter.py::test_triton_imported_first_is_refused_in_words",
    "flash_versions/dispatch/test_interpreter.py::test_turned_on_too_late_is_refused_in_words",
    "flash_versions/dispatch/test_interpreter.py::test_whatever_turns_it_on_makes_bf16_right",
    "flash_versions/dispatch/test_ops.py::test_compile_takes_every_length_without_recompiling",
    "flash_versions/dispatch/test_ops.py::test_opcheck",
    "flash_versions/integrations/test_context_parallel.py::test_the_command_for_gpus_on_the_cpu",
    "flash_versions/integrations/test_integrations_hf.py::test_compile_of_training",
    "flash_versions/integrations/test_integrations_hf.py::test_every_version",
    "flash_versions/integrations/test_integrations_hf.py::test_generate_token_for_token",
    "flash_versions/integrations/test_integrations_hf.py::test_logits_and_gradients",
    "flash_versions/tools/test_accuracy.py",
    "flash_versions/tools/test_bench.py",
    "flash_versions/tools/test_diff_plain.py::test_backward_is_the_full_kernel_to_the_bit",
    "flash_versions/tools/test_inspect.py",
    "flash_versions/tools/test_measure.py",
    "flash_versions/tools/test_plot.py",
    "flash_versions/tools/test_report.py",
    "flash_versions/oracle/test_budget.py::test_flash_arithmetic_is_within_budget",
    "flash_versions/puzzles/test_puzzles.py::test_an_endless_loop_is_stopped",
    "flash_versions/puzzles/test_puzzles.py::test_solutions_compile_for_a_gpu",
    "flash_versions/puzzles/test_puzzles.py::test_the_first_three_can_be_solved_from_the_hints_alone",
    "flash_versions/versions/decode/test_decode.py::test_what_the_compiler_makes_of_it",
    "flash_versions/versions/decode/test_stream_k.py::test_what_the_compiler_makes_of_it",
    "flash_versions/versions/fp8/test_quantize.py::test_compiles_without_spills_in_16_byte_accesses",
    "flash_versions/versions/test_attention.py::test_any_strides",
    "flash_versions/versions/test_attention.py::test_gradients_of_any_strides",
    "flash_versions/versions/test_fa1.py::test_backward_of_any_tile",
    "flash_versions/versions/test_fa3.py::test_equivalence_of_the_kernel_itself",
    "flash_versions/versions/test_fa3.py::test_gradients_of_the_kernels_themselves",
    "flash_versions/versions/test_packed.py::test_more_sequences_than_are_searched_at_once",
    "flash_versions/versions/test_packed.py::test_rows_of_no_sequence_see_no_key",
    "flash_versions/versions/test_property.py",
    "gpu/test_hopper_backward.py",
    "gpu/test_shared_gpu.py",
    "packaging/test_kernels_hub.py::test_kernels_loads_it",
    "packaging/test_kernels_hub.py::test_transformers_uses_it",
    "packaging/test_kernels_hub.py::test_two_of_them_share_nothing",
    "packaging/test_types.py::test_a_program_of_a_user_is_clean",
    "packaging/test_types.py::test_wrong_calls_are_found",
    "packaging/test_wheel.py",
    "packaging/test_without_triton.py::test_a_command_that_needs_kernels_says_so",
    "packaging/test_without_triton.py::test_kernels_can_be_read",
    "trainers/test_fsdp.py",
    "trainers/test_trainer.py::test_the_whole_model_compiled",
    "transformer/generation/test_generate_refusals.py::test_the_command_in_a_process_of_its_own",
    "transformer/kernels/test_gemv.py::test_compiled_code",
    "transformer/kernels/test_gemv.py::test_qkv",
    "transformer/kernels/test_sample.py::test_a_draw_inverts_the_cumulative_distribution",
    "transformer/model/test_checkpoints.py::test_every_attention_gives_the_same_text",
    "transformer/model/test_checkpoints.py::test_reinforced_meets_its_bar_on_held_out_problems",
    "transformer/model/test_families.py::test_greedy_answers_are_those_of_transformers",
    "transformer/model/test_fused.py::test_greedy_tokens_are_those_of_the_ordinary_forward",
    "transformer/model/test_paged_cache.py::test_a_row_does_not_depend_on_who_had_its_place",
    "transformer/rl/test_grpo.py::test_a_damaged_state_is_one_sentence",
    "transformer/rl/test_grpo.py::test_the_final_checkpoint_loads_everywhere",
    "transformer/rl/test_grpo.py::test_the_sloppy_model_learns_to_add",
    "transformer/rl/test_grpo.py::test_with_shuffled_rewards_it_does_not",
    "transformer/rl/test_grpo_run.py::test_a_run_killed_at_random_ends_in_the_same_bits",
    "transformer/rl/test_grpo_run.py::test_a_run_killed_between_its_writes_ends_in_the_same_bits",
    "transformer/rl/test_grpo_run.py::test_ctrl_c_says_how_to_go_on",
    "transformer/rl/test_real_models.py::test_the_command_trains_it",
    "transformer/rl/test_trainer.py::test_the_result_is_the_mean_of_the_last_steps",
    "transformer/training/test_parallel.py",
    "transformer/training/test_ship.py",
    "transformer/training/test_train.py::test_a_killed_run_leaves_neither_workers_nor_its_lock",
    "transformer/training/test_train.py::test_any_attention_can_train",
    "transformer/training/test_tuning.py::test_two_processes_end_where_one_does",
]
END_OF_NAME = re.compile(r"[\[@]")  # what follows are parameters, and a group of pytest-xdist
REPEATED = re.compile(r"\bsm_(?!90)\d+|(?<!b)float16")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left to `make test-all`; see tests/helpers/slow.py")


def pytest_collection_modifyitems(items):
    for item in items:
        path, _, name = item.nodeid.removeprefix("tests/").partition("::")
        function = f"{path}::{END_OF_NAME.split(name)[0]}"
        if path in SLOW or function in SLOW or REPEATED.search(name):
            item.add_marker(pytest.mark.slow)
