// The JavaScript kernel of the code interpreter: cells come as JSON lines on
// descriptor 0, which is a socket, and events go back on it.
"use strict";
const net = require("net");
const util = require("util");
const vm = require("vm");
const readline = require("readline");
const { createRequire } = require("module");

const control = new net.Socket({ fd: 0, readable: true, writable: true });
const emit = (event) => control.write(JSON.stringify(event) + "\n");
let count = 0;

globalThis.require = createRequire(process.cwd() + "/");
globalThis.display = (...values) => values.forEach((value) => emitResult(value, false));

function emitResult(value, isMain) {
  const text = typeof value === "string" ? value : util.inspect(value);
  const event = { type: "result", text, is_main_result: isMain };
  if (value !== null && typeof value === "object") {
    try {
      event.json = JSON.parse(JSON.stringify(value));
    } catch {
      // What has no JSON form is shown as text alone.
    }
  }
  emit(event);
}

// `const` and `let` at the top of a cell are to be there in the next one.
function script(code, name) {
  try {
    return new vm.Script(code, { filename: name });
  } catch (error) {
    if (!(error instanceof SyntaxError) || !/\bawait\b/.test(code)) throw error;
    // The last statement's value is the cell's: it begins after the last line
    // end, or after the last semicolon.
    const plain = code.trimEnd().replace(/;$/, "");
    const cuts = [plain.lastIndexOf("\n"), plain.lastIndexOf(";")].map((index) => index + 1);
    const attempts = cuts.map((at) => `${plain.slice(0, at)}\nreturn (${plain.slice(at)});`);
    attempts.push(code);
    for (const body of attempts) {
      try {
        return new vm.Script(`(async () => {${body}\n})()`, { filename: name });
      } catch {
        // The next form may do.
      }
    }
    throw error;
  }
}

async function execute(message) {
  count += 1;
  emit({ type: "number_of_executions", execution_count: count });
  Object.assign(process.env, message.environment || {});
  const before = {};
  for (const [name, value] of Object.entries(message.env_vars || {})) {
    before[name] = process.env[name];
    process.env[name] = value;
  }
  try {
    const value = await script(message.code, `cell ${count}`).runInThisContext({
      breakOnSigint: true,
    });
    if (value !== undefined) emitResult(value, true);
  } catch (error) {
    const known = error instanceof Error || (error && error.stack);
    emit({
      type: "error",
      name: known ? error.name : "Error",
      value: known ? error.message : util.inspect(error),
      traceback: known ? error.stack : util.inspect(error),
    });
  }
  for (const [name, value] of Object.entries(before)) {
    if (value === undefined) delete process.env[name];
    else process.env[name] = value;
  }
  emit({ type: "end_of_execution", cell: message.cell });
}

process.on("SIGINT", () => {});
process.on("uncaughtException", (error) => process.stderr.write(`${error.stack || error}\n`));
let queue = Promise.resolve();
readline.createInterface({ input: control }).on("line", (line) => {
  queue = queue.then(() => execute(JSON.parse(line)));
});
control.on("end", () => process.exit(0));
emit({ type: "ready" });
