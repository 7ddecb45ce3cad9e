"""Values as clients see them: representations by kind, and display()."""

import base64
import sys
import types

_emit = None

# Method of the object, field of the event.
METHODS = (
    ("_repr_html_", "html"),
    ("_repr_markdown_", "markdown"),
    ("_repr_svg_", "svg"),
    ("_repr_png_", "png"),
    ("_repr_jpeg_", "jpeg"),
    ("_repr_pdf_", "pdf"),
    ("_repr_latex_", "latex"),
    ("_repr_json_", "json"),
    ("_repr_javascript_", "javascript"),
)

FIELDS = {
    "text/plain": "text",
    "text/html": "html",
    "text/markdown": "markdown",
    "image/svg+xml": "svg",
    "image/png": "png",
    "image/jpeg": "jpeg",
    "application/pdf": "pdf",
    "text/latex": "latex",
    "application/json": "json",
    "application/javascript": "javascript",
    "e2b/data": "data",
    "e2b/chart": "chart",
}


def install(emit):
    global _emit
    _emit = emit
    # Behind all others: an IPython that is installed is found first.
    sys.meta_path.append(_ShimFinder)


def display(*values, raw=False, display_id=None, **_):
    """Shows values in every form they have."""
    for value in values:
        if raw and isinstance(value, dict):
            emit_bundle(value, is_main=False)
        else:
            emit_result(value, is_main=False)


def emit_result(value, is_main):
    sys.stdout.flush()
    # The main result is followed by the end of the cell at once.
    _emit({"type": "result", **fields_of(value), "is_main_result": is_main}, more=is_main)


def emit_bundle(bundle, is_main):
    sys.stdout.flush()
    _emit({"type": "result", **from_mime(bundle), "is_main_result": is_main})


def fields_of(value):
    """Every representation of a value; one that fails is left out."""
    bundle = _call(value, "_repr_mimebundle_")
    if bundle is None:
        bundle = _call(value, "_repr_mimebundle_", include=None, exclude=None)
    if isinstance(bundle, tuple):
        bundle = bundle[0]
    fields = from_mime(bundle) if isinstance(bundle, dict) else {}
    for method, field in METHODS:
        if field in fields:
            continue
        shown = _call(value, method)
        # Some methods give their metadata along.
        if isinstance(shown, tuple) and len(shown) == 2:
            shown = shown[0]
        if shown is not None:
            fields[field] = _plain(shown)
    if "text" not in fields:
        fields["text"] = text_of(value)
    for field, extract in (("data", _data_of), ("chart", _chart_of), ("png", _png_of)):
        if field not in fields:
            extracted = extract(value)
            if extracted:
                fields[field] = extracted
    return fields


def from_mime(bundle):
    """A bundle by MIME type as fields; unknown types go to `extra`."""
    fields, extra = {}, {}
    for kind, value in bundle.items():
        if kind in FIELDS:
            fields[FIELDS[kind]] = _plain(value)
        else:
            extra[kind] = _plain(value)
    if extra:
        fields["extra"] = extra
    text = fields.get("text")
    if isinstance(text, str):
        fields["text"] = _unquote(text)
    return fields


def text_of(value):
    try:
        if isinstance(value, (list, dict, set, tuple, frozenset)) and len(value) > 6:
            import pprint

            text = pprint.pformat(value, width=80, compact=True, sort_dicts=False)
            # Large collections are for machines: one item a line helps nobody.
            if text.count("\n") > 1000:
                text = repr(value)
        else:
            text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr() raises {type(error).__name__}: {error}>"
    return _unquote(text)


def _unquote(text):
    # A string is shown without its quotes, as clients of this protocol expect.
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text


def _call(value, name, **arguments):
    if isinstance(value, type):
        return None
    # A proxy that has every attribute has none of ours.
    if getattr(value, "_warren_no_such_attribute_", None) is not None:
        return None
    method = getattr(value, name, None)
    if not callable(method):
        return None
    try:
        return method(**arguments)
    except Exception:
        return None


def _plain(value):
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(value).decode()
    return value


def _data_of(value):
    """A table as columns."""
    pandas = sys.modules.get("pandas")
    if pandas is None or not isinstance(value, getattr(pandas, "DataFrame", ())):
        custom = _call(value, "_repr_e2b_data_")
        return custom if isinstance(custom, dict) else None
    try:
        import json

        columns = value.to_dict(orient="list")
        return {
            str(name): json.loads(json.dumps(items, default=_scalar))
            for name, items in columns.items()
        }
    except Exception:
        return None


def _scalar(value):
    for method in ("isoformat", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return str(value)


def _is_figure(value):
    figure = sys.modules.get("matplotlib.figure")
    return figure is not None and isinstance(value, figure.Figure)


def _png_of(value):
    if not _is_figure(value):
        return None
    import warren_inline

    return warren_inline.png_of(value)


def _chart_of(value):
    if not _is_figure(value):
        return None
    import warren_chart

    try:
        return warren_chart.describe(value)
    except Exception:
        return None


class _ShimFinder:
    """Finds `IPython.display` when no IPython is installed."""

    NAMES = ("IPython", "IPython.display", "IPython.core", "IPython.core.display")

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name not in cls.NAMES:
            return None
        from importlib.machinery import ModuleSpec

        return ModuleSpec(name, cls, is_package=True)

    @staticmethod
    def create_module(spec):
        return types.ModuleType(spec.name)

    @staticmethod
    def exec_module(module):
        import builtins

        module.get_ipython = builtins.get_ipython
        module.display = display
        module.clear_output = lambda wait=False: None
        module.update_display = display
        for name, kind in SHOWN.items():
            setattr(module, name, kind)
        if module.__name__ == "IPython":
            import importlib

            module.display = importlib.import_module("IPython.display")


class _Shown:
    """Text or bytes that say of themselves what they are."""

    kind = "text/plain"

    def __init__(self, data=None, url=None, filename=None, **_):
        if filename is not None:
            with open(filename, "rb") as file:
                data = file.read()
        self.data = data if data is not None else url

    def _repr_mimebundle_(self, include=None, exclude=None):
        data = self.data
        if isinstance(data, bytes) and not self.kind.startswith(("image/p", "image/j", "application/p")):
            data = data.decode(errors="replace")
        return {self.kind: data, "text/plain": repr(self)}

    def __repr__(self):
        return f"<IPython.core.display.{type(self).__name__} object>"


def _shown(name, kind):
    return type(name, (_Shown,), {"kind": kind})


class _Image(_Shown):
    kind = "image/png"

    def __init__(self, data=None, url=None, filename=None, format=None, **_):
        if isinstance(data, str) and url is None and filename is None:
            filename, data = data, None
        super().__init__(data, url, filename)
        if isinstance(self.data, bytes) and self.data[:2] == b"\xff\xd8":
            self.kind = "image/jpeg"


_Image.__name__ = "Image"

SHOWN = {
    "HTML": _shown("HTML", "text/html"),
    "Markdown": _shown("Markdown", "text/markdown"),
    "SVG": _shown("SVG", "image/svg+xml"),
    "Latex": _shown("Latex", "text/latex"),
    "Math": _shown("Math", "text/latex"),
    "JSON": _shown("JSON", "application/json"),
    "Javascript": _shown("Javascript", "application/javascript"),
    "Pretty": _shown("Pretty", "text/plain"),
    "Image": _Image,
}
