"""Attribution graphs of a prompt (section 13 of the method): which components a prediction comes from."""

from param_decomp_lab.graph.graph import Edge, Graph, Node

__all__ = ["Edge", "Graph", "Node"]
