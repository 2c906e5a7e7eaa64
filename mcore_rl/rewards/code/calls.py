"""Makes a program call one of its functions: arguments come in a file, and so does the result.

program + call --> sandbox, with arguments.json --> result.json

Values are those of JSON. What the function prints goes to standard output and does not count.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from mcore_rl.rewards.code.driver import pack, unpack

ARGUMENTS = "arguments.json"
RESULT = "result.json"
"""Files of the sandbox's folder; paths are relative to it."""

# `import()` is there in CommonJS and in modules; `require` only in CommonJS.
_SCRIPT = """
;(async () => {{
  const mcoreRlFiles = await import("node:fs");
  const mcoreRlGiven = JSON.parse(mcoreRlFiles.readFileSync("{arguments}", "utf8"));
  const mcoreRlOwner = typeof Solution === "function" ? new Solution() : null;
  const mcoreRlFound = mcoreRlOwner !== null && typeof mcoreRlOwner.{function} === "function"
    ? await mcoreRlOwner.{function}(...mcoreRlGiven) : await {function}(...mcoreRlGiven);
  mcoreRlFiles.writeFileSync("{result}", JSON.stringify(mcoreRlFound));
}})();
"""

_GO_PACKAGE = re.compile(r"^package[ \t]+\w+[ \t]*;?", re.MULTILINE)
_GO_MAIN = re.compile(r"^func[ \t]+main[ \t]*\(", re.MULTILINE)
# On the line of the package clause, so that errors name the program's own lines.
_GO_HEAD = (
    'package main; import (mcoreRlJson "encoding/json"; mcoreRlOs "os"; mcoreRlReflect "reflect"); '
)
# init runs before main, so a program may have a main of its own.
_GO_CALL = """
func init() {{
	text, err := mcoreRlOs.ReadFile("{arguments}")
	var given []mcoreRlJson.RawMessage
	if err == nil {{
		err = mcoreRlJson.Unmarshal(text, &given)
	}}
	called := mcoreRlReflect.ValueOf({function})
	if err != nil || called.Type().NumIn() != len(given) {{
		panic("{function} takes another number of arguments")
	}}
	values := make([]mcoreRlReflect.Value, len(given))
	for i := range given {{
		place := mcoreRlReflect.New(called.Type().In(i))
		if err := mcoreRlJson.Unmarshal(given[i], place.Interface()); err != nil {{
			panic(err)
		}}
		values[i] = place.Elem()
	}}
	call := called.Call
	if called.Type().IsVariadic() {{
		call = called.CallSlice
	}}
	results := []interface{{}}{{}}
	for _, result := range call(values) {{
		results = append(results, mcoreRlPlain(result))
	}}
	var all interface{{}} = results
	if len(results) == 1 {{
		all = results[0]
	}}
	if text, err = mcoreRlJson.Marshal(all); err == nil {{
		err = mcoreRlOs.WriteFile("{result}", text, 0o644)
	}}
	if err != nil {{
		panic(err)
	}}
	mcoreRlOs.Exit(0)
}}

// An empty slice may be nil, which JSON would have as null, and bytes would be base64.
func mcoreRlPlain(value mcoreRlReflect.Value) interface{{}} {{
	switch value.Kind() {{
	case mcoreRlReflect.Slice, mcoreRlReflect.Array:
		entries := make([]interface{{}}, value.Len())
		for i := range entries {{
			entries[i] = mcoreRlPlain(value.Index(i))
		}}
		return entries
	}}
	return value.Interface()
}}
"""


def _script_call(source: str, function: str) -> str:
    return source + _SCRIPT.format(function=function, arguments=ARGUMENTS, result=RESULT)


def _go_call(source: str, function: str) -> str:
    source, has_package = _GO_PACKAGE.subn(lambda _: _GO_HEAD, source, count=1)
    if not has_package:
        source = _GO_HEAD + source
    call = _GO_CALL.format(function=function, arguments=ARGUMENTS, result=RESULT)
    main = "" if _GO_MAIN.search(source) else "\nfunc main() {}\n"
    return source + call + main


_WRAPPERS: Mapping[str, Callable[[str, str], str]] = {
    "go": _go_call,
    "nodejs": _script_call,
    "typescript": _script_call,
}
CALL_LANGUAGES = ("python", *_WRAPPERS)
"""Languages whose functions can be called."""


def with_call(source: str, language: str, function: str) -> str:
    """Return a program of CALL_LANGUAGES but Python that calls `function`, which must be a name."""
    return _WRAPPERS[language](source, function)


def arguments_file(packed_arguments: Any) -> bytes:
    """Return the file of packed arguments. Raises TypeError if JSON has no such value."""
    return json.dumps(unpack(packed_arguments)).encode()


def read_packed_result(content: bytes | None) -> str:
    """Return the packed value of a result's file, as JSON; empty if it holds none."""
    if content is None:
        return ""
    try:
        return json.dumps(pack(json.loads(content)))
    except (ValueError, RecursionError):  # the program may write anything there
        return ""
