"""Errors as notebooks show them: the cell's lines around the failing one."""

import linecache
import re
import traceback

CONTEXT_LINES = 2
FRAMES_MAX = 40
RULE = "-" * 75


def describe(error):
    """Name, value and traceback of an error."""
    name = type(error).__name__
    return {"name": name, "value": str(error), "traceback": render(error)}


def render(error):
    name = type(error).__name__
    if isinstance(error, SyntaxError) and _is_cell(error.filename or ""):
        lines = traceback.format_exception_only(type(error), error)
        return "".join(_cell_names(line) for line in lines).rstrip()
    parts = []
    for link, cause in _chain(error):
        if link:
            parts.append(f"\n{link}\n")
        head = "Traceback (most recent call last)"
        title = type(cause).__name__
        parts.append(RULE)
        parts.append(title + head.rjust(max(len(RULE) - len(title), len(head) + 1)))
        parts.extend(_frames(cause))
        last = "".join(traceback.format_exception_only(type(cause), cause)).rstrip()
        parts.append(last)
    return "\n".join(parts) if parts else name


def _chain(error):
    """The error and what led to it, the first cause first."""
    links, seen = [], set()
    link = ""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        links.append((link, error))
        if error.__cause__ is not None:
            link = "The above exception was the direct cause of the following exception:"
            error = error.__cause__
        elif error.__context__ is not None and not error.__suppress_context__:
            link = "During handling of the above exception, another exception occurred:"
            error = error.__context__
        else:
            error = None
    links.reverse()
    # A link belongs between a cause and what follows it.
    return [
        (links[index - 1][0] if index else "", cause) for index, (_, cause) in enumerate(links)
    ]


def _frames(error):
    frames = [
        (frame, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
        if not frame.f_code.co_filename.rpartition("/")[2].startswith("warren_")
    ]
    if len(frames) > FRAMES_MAX:
        half = FRAMES_MAX // 2
        skipped = len(frames) - 2 * half
        shown = [_frame(*each) for each in frames[:half]]
        shown.append(f"[... skipping {skipped} frames]\n")
        return shown + [_frame(*each) for each in frames[-half:]]
    return [_frame(*each) for each in frames]


def _frame(frame, number):
    path, function = frame.f_code.co_filename, frame.f_code.co_name
    if _is_cell(path):
        head = f"{_cell_names(path)}, line {number}"
    else:
        head = f"File {path}:{number}"
    if function != "<module>":
        head += f", in {function}()"
    lines = [head]
    for each in range(number - CONTEXT_LINES, number + CONTEXT_LINES + 1):
        text = linecache.getline(path, each).rstrip("\n")
        if each < 1 or (not text and each != number):
            continue
        mark = f"----> {each}" if each == number else str(each).rjust(7 if each > 9 else 7)
        lines.append(f"{mark.rjust(7)} {text}")
    return "\n".join(lines) + "\n"


def _is_cell(path):
    return path.startswith("<cell ")


def _cell_names(text):
    return re.sub(r"\"?<cell (\d+)>\"?", r"Cell In[\1]", text)
