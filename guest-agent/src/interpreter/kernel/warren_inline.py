"""Figures of matplotlib as results, without a window.

Nothing is imported until the user imports matplotlib: a finder in front of the
others sets the backend then.
"""

import base64
import io
import os
import sys
import types

BACKEND = "module://warren_backend"


def install():
    sys.meta_path.insert(0, _BackendFinder)
    loaded = sys.modules.get("matplotlib")
    if loaded is not None:
        _choose_backend(loaded)


def _choose_backend(matplotlib):
    if "MPLBACKEND" not in os.environ:
        matplotlib.rcParams["backend"] = BACKEND


def png_of(figure):
    """A figure as base64 of a PNG."""
    buffer = io.BytesIO()
    figure.canvas.print_figure(
        buffer,
        format="png",
        dpi=figure.dpi,
        facecolor=figure.get_facecolor(),
        bbox_inches="tight",
    )
    return base64.b64encode(buffer.getvalue()).decode()


def flush():
    """Shows the figures that a cell has left open, and closes them."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return
    import warren_display

    try:
        if pyplot.get_backend() not in (BACKEND, "warren_backend"):
            return
        for number in pyplot.get_fignums():
            figure = pyplot.figure(number)
            if figure.axes or figure.get_children()[1:]:
                warren_display.emit_result(figure, is_main=False)
    finally:
        pyplot.close("all")


def discard():
    """Forgets the figures of a cell that failed."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is not None:
        try:
            flush()
        except BaseException:
            pass


class _BackendFinder:
    _busy = False

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name == "warren_backend":
            from importlib.machinery import ModuleSpec

            return ModuleSpec(name, cls)
        if name != "matplotlib" or cls._busy:
            return None
        # Whoever really finds it, we look at it after it is loaded.
        import importlib.util

        cls._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            cls._busy = False
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _choose_backend(module)

        spec.loader.exec_module = exec_module
        return spec

    @staticmethod
    def create_module(spec):
        return types.ModuleType(spec.name)

    @staticmethod
    def exec_module(module):
        from matplotlib.backends import backend_agg

        module.FigureCanvas = backend_agg.FigureCanvasAgg
        module.FigureManager = getattr(backend_agg, "FigureManagerBase", None)
        if hasattr(backend_agg, "new_figure_manager"):
            module.new_figure_manager = backend_agg.new_figure_manager
        module.show = lambda *arguments, **keywords: flush()
