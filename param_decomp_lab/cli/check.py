"""`pd check`."""

from param_decomp_lab.cli.options import Config, Overrides
from param_decomp_lab.ui.console import PlainConsole


def check(config: Config, overrides: Overrides = None) -> None:
    """Say what a run would do, without starting it: sites, losses and their cost, parameters, schedules.

    Needs neither weights nor an accelerator. The status is 0 when the configuration can be run and 2 when it cannot,
    with the reason; so `pd check` can guard a configuration in CI.

    Examples:

        pd check configs/toys/tms_5-2.yaml

        pd check configs/llama8b_l18_example.yaml --set pd.batch_size=32 --set mesh.fsdp=4
    """
    import jax

    from param_decomp_lab.check import check as check_run
    from param_decomp_lab.setup.checked_config import load_checked
    from param_decomp_lab.setup.resolved import ResolvedConfig

    jax.config.update("jax_platforms", "cpu")  # only shapes are computed: leave a GPU to those who train
    check_run(ResolvedConfig(load_checked(config, overrides or ())), PlainConsole())
