"""The `excel` server: reading and editing .xlsx workbooks and reading .csv files.

Model: every call opens the workbook, does one thing and, if it changed it, saves it atomically.

Invariants
- Values are the results cached in the file. openpyxl computes nothing: a formula without a cached
  result (any formula, once this server has saved the workbook) is shown as the formula itself, never
  as an empty cell.
- A failed edit leaves the file as it was: all operations apply to memory first.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

from deskrl.worlds.roots import WorldRoots, share
from deskrl.worlds.toolkit import ToolError

_MAX_ROWS = 1000
_MAX_COLUMNS = 100
_OPERATIONS = "set_cell {tab, cell, value}, append_row {tab, values}, clear_cell {tab, cell}, rename_tab {tab, name}"


class ExcelServer:
    """Tools over workbooks."""

    TOOLS = (
        "list_tabs_in_spreadsheet",
        "read_tab",
        "read_csv",
        "create_spreadsheet",
        "add_tab",
        "edit_spreadsheet",
        "add_content_text",
        "delete_content_cell",
    )

    def __init__(self, roots: WorldRoots) -> None:
        self._root = roots.filesystem

    def list_tabs_in_spreadsheet(self, file_path: Annotated[str, "Path of an .xlsx file"]) -> str:
        """List the tabs of a workbook with their index and size."""
        book = self._open(file_path)
        tabs = [
            {"index": index, "name": tab.title, "rows": tab.max_row, "columns": tab.max_column}
            for index, tab in enumerate(book.worksheets)
        ]
        return json.dumps({"file_path": file_path, "tabs": tabs}, ensure_ascii=False)

    def read_tab(
        self,
        file_path: Annotated[str, "Path of an .xlsx file"],
        tab_index: Annotated[int, "Tab number from 0"] = 0,
        cell_range: Annotated[str | None, "Range such as A1:C10; the whole tab when left out"] = None,
        include_formulas: Annotated[bool, "Show formulas beside their values"] = False,
        max_rows: Annotated[int, "Most rows to return, up to 1000"] = _MAX_ROWS,
        max_cols: Annotated[int, "Most columns to return, up to 100"] = _MAX_COLUMNS,
        compact: Annotated[bool, "Leave out empty cells"] = False,
    ) -> str:
        """Read the cells of one tab, a line per row, each cell as `A1: value`."""
        if max_rows < 1 or max_cols < 1:
            raise ToolError("max_rows and max_cols must be at least 1")
        formulas = _tab(self._open(file_path), tab_index)
        values = _tab(self._open(file_path, data_only=True), tab_index)
        first_col, first_row, last_col, last_row = _bounds(cell_range, formulas)
        end_row = min(last_row, first_row + min(max_rows, _MAX_ROWS) - 1)
        end_col = min(last_col, first_col + min(max_cols, _MAX_COLUMNS) - 1)
        lines = [f"Tab {formulas.title!r} (index {tab_index})"]
        for row in range(first_row, end_row + 1):
            cells = []
            for column in range(first_col, end_col + 1):
                cell = formulas.cell(row, column)
                text = _shown(cell.value, values.cell(row, column).value, include_formulas)
                if text or not compact:
                    cells.append(f"{cell.coordinate}: {text}")
            if cells:
                lines.append(" | ".join(cells))
        if end_row < last_row or end_col < last_col:
            lines.append(
                f"(cut: the range has {last_row - first_row + 1} rows and "
                f"{last_col - first_col + 1} columns; ask for a cell_range to see more)"
            )
        return "\n".join(lines)

    def read_csv(
        self,
        file_path: Annotated[str, "Path of a .csv file"],
        delimiter: Annotated[str, "Column separator"] = ",",
        max_rows: Annotated[int, "Most rows to return, up to 1000"] = _MAX_ROWS,
    ) -> str:
        """Read a CSV file, a line per row."""
        if len(delimiter) != 1:
            raise ToolError("delimiter must be one character")
        path = self._root.file(file_path)
        try:
            with path.open(encoding="utf-8-sig", newline="") as stream:
                rows = list(csv.reader(stream, delimiter=delimiter))
        except (UnicodeDecodeError, csv.Error) as error:
            raise ToolError(f"{file_path!r} is not a readable CSV file: {error}") from error
        limit = max(1, min(max_rows, _MAX_ROWS))
        lines = [" | ".join(row) for row in rows[:limit]]
        if len(rows) > limit:
            lines.append(f"(cut: {len(rows)} rows in all)")
        return "\n".join(lines) or "(empty file)"

    def create_spreadsheet(
        self,
        file_path: Annotated[str, "Path of the .xlsx file to create"],
        tab_name: Annotated[str, "Name of its first tab"] = "Sheet1",
        rows: Annotated[list[list[Any]] | None, "Rows of cell values; a value starting with = is a formula"] = None,
    ) -> str:
        """Create a workbook with one tab."""
        path = self._root.new_file(file_path, ".xlsx")
        from openpyxl import Workbook

        book = Workbook()
        _fill(book.active, tab_name, rows)
        _save(book, path)
        return json.dumps({"created": self._root.shown(path), "rows": len(rows or [])})

    def add_tab(
        self,
        file_path: Annotated[str, "Path of an .xlsx file"],
        tab_name: Annotated[str, "Name of the new tab"],
        rows: Annotated[list[list[Any]] | None, "Rows of cell values"] = None,
    ) -> str:
        """Add a tab to a workbook."""

        def change(book: Any) -> None:
            if tab_name in book.sheetnames:
                raise ToolError(f"{file_path!r} already has a tab named {tab_name!r}")
            _fill(book.create_sheet(), tab_name, rows)

        self._edit(file_path, change)
        return json.dumps({"file_path": file_path, "added_tab": tab_name})

    def edit_spreadsheet(
        self,
        file_path: Annotated[str, "Path of an .xlsx file"],
        operations: Annotated[list[dict[str, Any]], f"Each {{op, ...}}; op is one of: {_OPERATIONS}"],
    ) -> str:
        """Apply several changes to a workbook at once: all of them or, if one is wrong, none."""

        def change(book: Any) -> None:
            for index, operation in enumerate(operations):
                _apply(book, operation, index)

        if not operations:
            raise ToolError(f"operations is empty; use {_OPERATIONS}")
        self._edit(file_path, change)
        return json.dumps({"file_path": file_path, "applied": len(operations)})

    def add_content_text(
        self,
        file_path: Annotated[str, "Path of an .xlsx file"],
        cell: Annotated[str, "Cell such as B4"],
        value: Annotated[str, "Text, number or formula starting with ="],
        tab_index: Annotated[int, "Tab number from 0"] = 0,
    ) -> str:
        """Write one cell."""
        self._edit(file_path, lambda book: _set(_tab(book, tab_index), cell, _typed(value)))
        return json.dumps({"file_path": file_path, "cell": cell.upper(), "value": value}, ensure_ascii=False)

    def delete_content_cell(
        self,
        file_path: Annotated[str, "Path of an .xlsx file"],
        cell: Annotated[str, "Cell such as B4"],
        tab_index: Annotated[int, "Tab number from 0"] = 0,
    ) -> str:
        """Empty one cell."""
        self._edit(file_path, lambda book: _set(_tab(book, tab_index), cell, None))
        return json.dumps({"file_path": file_path, "cleared": cell.upper()})

    def _open(self, file_path: str, data_only: bool = False) -> Any:
        path = self._root.file(file_path)
        if path.suffix.lower() not in (".xlsx", ".xlsm"):
            raise ToolError(f"{file_path!r} is not an .xlsx file; .csv files are read with excel_read_csv")
        from openpyxl import load_workbook
        from openpyxl.utils.exceptions import InvalidFileException

        try:
            return load_workbook(path, data_only=data_only)
        except (InvalidFileException, BadZipFile, KeyError, ValueError) as error:
            raise ToolError(f"{file_path!r} is not a readable workbook: {error}") from error

    def _edit(self, file_path: str, change: Callable[[Any], None]) -> None:
        book = self._open(file_path)
        change(book)
        _save(book, self._root.file(file_path))


def _save(book: Any, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.part")
    book.save(temporary)
    os.replace(temporary, path)
    share(path)


def _tab(book: Any, index: int | str) -> Any:
    tabs = book.worksheets
    if isinstance(index, str):
        if index not in book.sheetnames:
            raise ToolError(f"no tab named {index!r}; the tabs are {', '.join(book.sheetnames)}")
        return book[index]
    if not 0 <= index < len(tabs):
        raise ToolError(f"tab_index must be between 0 and {len(tabs) - 1}")
    return tabs[index]


def _bounds(cell_range: str | None, tab: Any) -> tuple[int, int, int, int]:
    """Return first column, first row, last column, last row (1-based, inclusive)."""
    if cell_range is None or not cell_range.strip():
        return 1, 1, tab.max_column, tab.max_row
    from openpyxl.utils import range_boundaries

    try:
        first_col, first_row, last_col, last_row = range_boundaries(cell_range.strip().upper())
    except (ValueError, TypeError):
        raise ToolError(f"cell_range must look like A1:C10, got {cell_range!r}") from None
    # "A:C" and "2:5" leave the other axis open.
    return first_col or 1, first_row or 1, last_col or tab.max_column, last_row or tab.max_row


def _shown(formula: Any, value: Any, include_formulas: bool) -> str:
    if not (isinstance(formula, str) and formula.startswith("=")):
        return _text(formula)
    if value is None:
        return formula
    return f"{_text(value)} [{formula}]" if include_formulas else _text(value)


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return format(value, ".15g")
    return str(value)


def _typed(value: str) -> Any:
    """A number typed as text becomes a number, as in a spreadsheet program."""
    try:
        number = float(value)
    except ValueError:
        return value
    return int(number) if number.is_integer() and value.strip().lstrip("+-").isdigit() else number


def _set(tab: Any, cell: Any, value: Any) -> None:
    from openpyxl.utils import coordinate_to_tuple
    from openpyxl.utils.exceptions import CellCoordinatesException

    try:
        row, column = coordinate_to_tuple(str(cell).strip().upper())
    except (CellCoordinatesException, ValueError):
        raise ToolError(f"cell must look like B4, got {cell!r}") from None
    if isinstance(value, list | dict):
        raise ToolError(f"the value of a cell must be text, a number or true/false, got {value!r}")
    tab.cell(row, column).value = value


def _fill(tab: Any, name: str, rows: list[list[Any]] | None) -> None:
    try:
        tab.title = name
    except ValueError as error:
        raise ToolError(f"{name!r} cannot be a tab name: {error}") from error
    if not name or len(name) > 31:
        raise ToolError("a tab name has 1 to 31 characters")
    for number, row in enumerate(rows or [], start=1):
        _append(tab, number, row)


def _append(tab: Any, row: int, values: list[Any]) -> None:
    from openpyxl.utils import get_column_letter

    for column, value in enumerate(values, start=1):
        _set(tab, f"{get_column_letter(column)}{row}", value)


def _apply(book: Any, operation: dict[str, Any], index: int) -> None:
    op = operation.get("op")
    fields = {
        "set_cell": ("cell", "value"),
        "append_row": ("values",),
        "clear_cell": ("cell",),
        "rename_tab": ("name",),
    }
    if op not in fields:
        raise ToolError(f"operations[{index}]: unknown op {op!r}; use {_OPERATIONS}")
    missing = [field for field in fields[op] if field not in operation]
    if missing:
        raise ToolError(f"operations[{index}] ({op}): {missing[0]!r} is missing")
    tab = _tab(book, operation.get("tab", 0))
    if op == "set_cell":
        _set(tab, operation["cell"], operation["value"])
    elif op == "clear_cell":
        _set(tab, operation["cell"], None)
    elif op == "rename_tab":
        _fill(tab, str(operation["name"]), None)
    elif isinstance(operation["values"], list):
        # An empty sheet reports max_row 1.
        empty = tab.max_row == 1 and all(cell.value is None for cell in tab[1])
        _append(tab, 1 if empty else tab.max_row + 1, operation["values"])
    else:
        raise ToolError(f"operations[{index}] (append_row): 'values' must be a list")
