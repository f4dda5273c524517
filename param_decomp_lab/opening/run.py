"""`load_run` and what it gives: an opened run with its harvest, its attribution graphs and interventions."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from param_decomp_lab.graph.graph import Graph
from param_decomp_lab.graph.prompt_graph import GraphProgress, graph_of_prompt
from param_decomp_lab.harvest.files import Groups, Harvest, harvest_of
from param_decomp_lab.matching.result import MatchedRuns
from param_decomp_lab.opening.effect import PLACES, Effect, effect_of
from param_decomp_lab.opening.heads import (
    HeadPrograms,
    Heads,
    HeadScores,
    Partner,
    attention_of,
    contributions_on,
    head_scores_of,
    heads_of,
    partners_of,
)
from param_decomp_lab.opening.intervention import Intervention, intervene
from param_decomp_lab.opening.matched import match_runs
from param_decomp_lab.opening.nearest import Nearest, Side, nearest_components
from param_decomp_lab.opening.plots import Plots
from param_decomp_lab.opening.selection import Selection
from param_decomp_lab.runs.inputs import Inputs
from param_decomp_lab.runs.load import open_run
from param_decomp_lab.runs.opened import OpenedRun


class Run(OpenedRun):
    """A run opened by `load_run`: its components, CI function, target and metrics, its harvest and graphs.

    ``step``: the step of the checkpoint that was read. ``sites``: the sites by name, in canonical order, each with
    `d_in`, `d_out` and `C`. ``problem``, ``learned``, ``mesh``: for calling functions of `param_decomp_jax` directly
    (under `jax.set_mesh`).
    """

    @cached_property
    def harvest(self) -> Harvest:
        """What the components do on much text: the newest harvest of this step, read as it is asked for.

        Raises UserError if there is none (`pd harvest` makes it).
        """
        return harvest_of(self.folder, self.step)

    @cached_property
    def groups(self) -> Groups:
        """Components that act together, of `harvest`.

        Raises UserError if there are none (`pd cluster` finds them).
        """
        return self.harvest.groups

    def nearest(
        self,
        site: str,
        number: int,
        side: Side = "U",
        *,
        most: int = 12,
        sites: str | Sequence[str] | None = None,
        other: OpenedRun | None = None,
    ) -> list[Nearest]:
        """The components whose output directions (``U``) or input directions (``V``) are nearest to those of component
        ``number``, by absolute cosine, among the sites that write or read the same space; ``both``: by the product of
        the two cosines, among the sites that do both.

        ``other``: a run of the same target in which they are looked for; None for this one. ``sites``: names or
        patterns of those that are searched; None for all. Raises UserError for an unknown site, component or side, and
        for a run of another target.
        """
        return nearest_components(self, site, number, side, most, sites, other)

    def matched(self, other: "Run", *, sites: str | Sequence[str] | None = None) -> MatchedRuns:
        """This run's components matched one to one with another run's, at each site that both have (P5): the pairs, how
        similar they are, beside random directions, and how far they fire at the same positions.

        Those that fire in the `harvest` of each are matched. ``sites``: names or patterns; None for all. Raises
        UserError for runs of different targets, where no site is in both harvests, and without a harvest of each.
        """
        return match_runs(self, self.harvest, other, other.harvest, sites)

    def heads(self, site: str, component: int | None = None) -> Heads:
        """In which attention heads the components of a site lie, or one component: ``.share`` ``[C, heads]`` (H1).

        Of a site that writes queries, keys or values by U, of one that reads what the heads give by V. Raises UserError
        for other sites, and for an unknown component.
        """
        return heads_of(self, site, component)

    def head_scores(self, inputs: Inputs) -> HeadScores:
        """What the attention heads of the target read on a text, or on token ids ``[B, T]`` or ``[T]`` (H3):
        ``.previous``, ``.duplicate``, ``.induction`` and ``.first``, each ``[layers, heads]``, and ``.chance``;
        ``.of(run.heads(site))`` gives the same of components.

        Raises UserError for a target without attention, for inputs that do not fit, and without the target's weights.
        """
        return head_scores_of(self, self._head_programs, inputs)

    def attention(self, inputs: Inputs, layer: int) -> Float[np.ndarray, "*B heads T T"]:
        """The target's attention in one layer, from every position to every one, without a batch axis for a single
        row. The last axis adds up to 1. Raises UserError as `head_scores`, and for a layer that is not there."""
        return attention_of(self, self._head_programs, inputs, layer)

    def partners(self, site: str, component: int, *, most: int = 12, distances: int = 2) -> list[list[Partner]]:
        """For every query head, the components of the layer's ``k_proj`` with which a component of its ``q_proj`` adds
        most to the attention scores (or the other way round), by the weights and in the order of size (H2).

        ``distances``: contributions are given at 0 to ``distances - 1`` tokens between query and key. Raises UserError
        for other sites, where the other matrix is not decomposed, and for an unknown component.
        """
        return partners_of(self, self._head_programs, site, component, most, distances)

    def contributions(
        self, inputs: Inputs, site: str, component: int, others: Sequence[int]
    ) -> Float[np.ndarray, "others heads T T"]:
        """What a component of a ``q_proj``, with each of some components of the layer's ``k_proj`` (or the other way
        round), adds to the attention score from position t to s on a text or token ids ``[T]`` (H2); 0 for s > t.

        Raises UserError as `partners`, and for inputs that do not fit.
        """
        return contributions_on(self, self._head_programs, inputs, site, component, others)

    def effect(
        self,
        site: str,
        number: int,
        *,
        places: int = PLACES,
        harvest: Harvest | None = None,
        rows: Inputs | None = None,
        positions: Int[np.ndarray, " n"] | None = None,
    ) -> Effect:
        """What the output loses at the places where a component fires when it alone is zero-masked there (I5): the mean
        change of the log-probability of every token, the tokens that go up and down most, and the KL.

        The places are up to ``places`` of its firings, a uniform sample of them, in ``harvest`` (None: `harvest`); or
        ``positions``, one of each of these ``rows`` (``[n, T]``, a toy's ``[n, d]``). A toy has mean changes of its
        outputs instead, and the mean squared difference.

        Raises UserError for an unknown site or component, for rows and positions that do not fit, and for a component
        that never fires.
        """
        if harvest is None and rows is None:
            harvest = self.harvest
        return effect_of(self, site, number, places, harvest, rows, positions)

    @cached_property
    def _head_programs(self) -> HeadPrograms:
        return HeadPrograms(self.target)

    @cached_property
    def plot(self) -> Plots:
        """Figures of the run as matplotlib figures: ``run.plot.l0()``; `Plots.names` lists them."""
        return Plots(self)

    def graph(
        self,
        prompt: Inputs,
        target: str | int | Sequence[str | int] | None = None,
        *,
        optimize: Mapping[str, Any] | bool = False,
        progress: GraphProgress | None = None,
        **options: Any,
    ) -> Graph:
        """The attribution graph of a prompt: which components its prediction comes from, through which others.

        ``prompt``: a text or token ids; for a toy, the active features as text (``"3 7=0.5"``) or all features.
        ``target``: the tokens (as text or number; of a toy, features) whose logits are followed back; None for those
        that the model finds most likely. ``options``: fields of `param_decomp_lab.graph.build.GraphRequest`.

        ``optimize``: first lowers the importances of this prompt as far as its prediction allows, also under attack
        (O1 to O5), which leaves far fewer components; True, or fields of
        `param_decomp_lab.graph.optimize.OptimizeRequest`.

        Computed in fp32 with all components on and Δ on (E1 to E7, E10). Raises UserError if the prompt or an option is
        wrong.
        """
        return graph_of_prompt(self, prompt, target, optimize, progress, options)

    def intervene(self, prompt: Inputs, selection: Selection, **options: Any) -> Intervention:
        """Runs a prompt without and with an intervention on some components: off, scaled, set to an activation, or on
        alone (I1 to I4).

        ``prompt``: as for `graph`. ``selection``: components as text (``layers.3.mlp.down_proj:17``, at position 4
        alone ``layers.3.mlp.down_proj:17@4``), as nodes of a graph, or ``{site: numbers}``. ``options``: fields of
        `param_decomp_lab.opening.intervention.InterventionRequest`.

        Raises UserError for an unknown component, position or option.
        """
        return intervene(self, prompt, selection, **options)


def load_run(
    folder: str | Path, step: int | None = None, *, devices: int | None = None, target: str | Path | None = None
) -> Run:
    """Opens the run in ``folder`` for reading. The run may have ended or may still be training.

    Reads the components and the CI function from a checkpoint, whatever devices saved it. The target's weights are read
    when first needed: components, sites and metrics do not need them.

    ``step``: the checkpoint to read; None for the newest. ``devices``: the number of devices to shard the arrays over;
    None for one, or for all of this machine if they do not fit on one. ``target``: the folder with the target's
    weights, if it has moved since the run was trained.

    Raises UserError if there is no run in ``folder``, the checkpoint is missing or unreadable, `config.yaml` gives
    another method than the checkpoint was saved with, or the target's architecture is unknown.
    """
    return open_run(Run, folder, step, devices, target)
