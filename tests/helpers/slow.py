"""What `make test` leaves to `make test-all`.

`make test` has to end within 4 minutes on two cores, and to show every version, every feature,
forward, backward, what the compiler makes of them, and the models. So these tests are left out:
each took seconds of processor time, and tests that stay show most of what it shows. A name stands
for a whole file or for a function of it. One rule comes before the names: of the architectures,
`make test` compiles for sm_90 only.
"""

import re

import pytest

SLOW = [
    "compile/test_fa4_compile.py",
    "compile/test_gemm_compile.py",
    "compile/test_rmsnorm_gemm_compile.py",
    "documents/test_add_a_version.py",
    "documents/test_docs.py",
    "documents/test_notebooks.py",
    "emulator/test_fa4_emulated.py::test_every_switch",
    "emulator/test_fa4_emulated.py::test_nothing_is_found_where_no_bug_is",
    "emulator/test_fa4_emulated.py::test_planted_bugs_are_found",
    "emulator/test_fp8_emulated.py::test_every_switch",
    "emulator/test_fp8_emulated.py::test_planted_bugs_are_found",
    "emulator/test_fp8_emulated.py::test_scales_of_every_kind",
    "emulator/test_gemm_emulated.py::test_every_switch",
    "emulator/test_hopper_backward_emulated.py::test_every_switch",
    "emulator/test_hopper_backward_emulated.py::test_nothing_is_found_where_no_bug_is",
    "emulator/test_hopper_backward_emulated.py::test_planted_bugs_are_found",
    "emulator/test_hopper_emulated.py::test_every_switch",
    "emulator/test_hopper_emulated.py::test_planted_bugs_are_found",
    "emulator/test_rmsnorm_gemm_emulated.py::test_every_switch_emulated",
    "emulator/test_roles.py::test_every_role_follows_the_table",
    "flash_versions/dispatch/test_ops.py::test_compile_takes_every_length_without_recompiling",
    "flash_versions/dispatch/test_ops.py::test_opcheck",
    "flash_versions/doors/test_context_parallel.py::test_the_command_for_gpus_on_the_cpu",
    "flash_versions/doors/test_integrations_hf.py::test_every_version",
    "flash_versions/laboratory/test_inspect.py::test_chosen_kernel_as_json",
    "flash_versions/laboratory/test_inspect.py::test_code_to_a_file",
    "flash_versions/laboratory/test_inspect.py::test_precision_compiles_what_quantises_too",
    "flash_versions/laboratory/test_plot.py::test_command_draws_and_removes",
    "flash_versions/versions/test_decode.py::test_what_the_compiler_makes_of_it",
    "flash_versions/versions/test_fa3.py::test_equivalence_of_the_kernel_itself",
    "flash_versions/versions/test_fa3.py::test_gradients_of_the_kernels_themselves",
    "flash_versions/versions/test_property.py",
    "flash_versions/versions/test_quantize.py::test_compiles_without_spills_in_16_byte_accesses",
    "gpu/test_hopper_backward.py",
    "gpu/test_shared_gpu.py",
    "packaging/test_wheel.py",
    "transformer/generation/test_generate_refusals.py::test_the_command_in_a_process_of_its_own",
    "transformer/model/test_checkpoints.py::test_every_attention_gives_the_same_text",
    "transformer/model/test_checkpoints.py::test_reinforced_meets_its_bar_on_held_out_problems",
    "transformer/rl/test_grpo.py::test_a_damaged_state_is_one_sentence",
    "transformer/rl/test_grpo.py::test_the_final_checkpoint_loads_everywhere",
    "transformer/rl/test_grpo.py::test_the_sloppy_model_learns_to_add",
    "transformer/rl/test_grpo.py::test_with_shuffled_rewards_it_does_not",
    "transformer/rl/test_grpo_run.py::test_a_run_killed_at_random_ends_in_the_same_bits",
    "transformer/rl/test_grpo_run.py::test_ctrl_c_says_how_to_go_on",
    "transformer/rl/test_real_models.py::test_the_command_trains_it",
    "transformer/rl/test_trainer.py::test_the_result_is_the_mean_of_the_last_steps",
    "transformer/training/test_parallel.py::test_rollouts_gradients_weights_and_scores",
    "transformer/training/test_ship.py",
    "transformer/training/test_train.py::test_any_attention_can_train",
]
OTHER_ARCHITECTURE = re.compile(r"\bsm_(?!90)\d+")


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: left to `make test-all`; see tests/helpers/slow.py")


def pytest_collection_modifyitems(items):
    for item in items:
        path, _, name = item.nodeid.removeprefix("tests/").partition("::")
        function = f"{path}::{name.partition('[')[0]}"
        if path in SLOW or function in SLOW or OTHER_ARCHITECTURE.search(name):
            item.add_marker(pytest.mark.slow)
