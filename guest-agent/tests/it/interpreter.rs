use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warren_base::skip::skipped;

use crate::support::{Agent, Chunked, user_name};

/// An agent whose cells run as the user of this test; `None` without Python.
fn agent() -> Option<Agent> {
    let python = std::process::Command::new("python3").arg("--version").output();
    if python.is_err() {
        skipped("there is no python3");
        return None;
    }
    let agent = Agent::start();
    let message = json!({"defaultUser": user_name(), "defaultWorkdir": "/tmp"}).to_string();
    assert_eq!(agent.request("POST", "/init", &[], message.as_bytes()).status, 204);
    Some(agent)
}

fn open(agent: &Agent, body: &Value) -> BufReader<Chunked> {
    let body = body.to_string();
    BufReader::new(Chunked::new(agent.open(
        "interpreter",
        "POST",
        "/execute",
        &[],
        body.as_bytes(),
    )))
}

fn execute(agent: &Agent, body: Value) -> Vec<Value> {
    let lines = open(agent, &body).lines();
    lines.map(|line| serde_json::from_str(&line.unwrap()).unwrap()).collect()
}

fn run(agent: &Agent, code: &str) -> Vec<Value> {
    execute(agent, json!({ "code": code }))
}

fn of_kind<'a>(events: &'a [Value], kind: &str) -> Vec<&'a Value> {
    events.iter().filter(|event| event["type"] == kind).collect()
}

fn text(events: &[Value], kind: &str) -> String {
    of_kind(events, kind).iter().map(|event| event["text"].as_str().unwrap()).collect()
}

#[test]
fn cell_keeps_state_and_shows_its_value() {
    let Some(agent) = agent() else { return };
    let events =
        run(&agent, "import sys\nx = 20\nprint('out')\nprint('err', file=sys.stderr)\nx + 1");
    assert_eq!(text(&events, "stdout"), "out\n");
    assert_eq!(text(&events, "stderr"), "err\n");
    let result = of_kind(&events, "result")[0];
    assert_eq!((&result["text"], &result["is_main_result"]), (&json!("21"), &json!(true)));
    assert_eq!(events.last().unwrap(), &json!({"type": "end_of_execution"}));
    let events = run(&agent, "x");
    assert_eq!(text(&events, "result"), "20");
    assert_eq!(of_kind(&events, "number_of_executions")[0]["execution_count"], 2);
}

#[test]
fn cell_errors_have_name_value_and_traceback() {
    let Some(agent) = agent() else { return };
    let events = run(&agent, "def f():\n    return 1 / 0\nf()");
    let error = of_kind(&events, "error")[0];
    assert_eq!(error["name"], "ZeroDivisionError");
    assert_eq!(error["value"], "division by zero");
    let traceback = error["traceback"].as_str().unwrap();
    assert!(traceback.contains("Cell In[1], line 3"), "{traceback}");
    assert!(traceback.contains("----> 2     return 1 / 0"), "{traceback}");
    let events = run(&agent, "input()");
    assert_eq!(of_kind(&events, "error")[0]["name"], "StdinNotImplementedError");
}

#[test]
fn cell_rich_results_and_await() {
    let Some(agent) = agent() else { return };
    let code = "class Rich:\n    def _repr_html_(self): return '<b>'\n\
                \x20   def _repr_png_(self): return b'png'\n\
                \x20   def _repr_json_(self): return {'a': 1}\n\
                import asyncio\nawait asyncio.sleep(0)\ndisplay(Rich())\nRich()";
    let events = run(&agent, code);
    let results = of_kind(&events, "result");
    assert_eq!(results.len(), 2);
    assert_eq!(results[0]["is_main_result"], false);
    assert_eq!(results[1]["html"], "<b>");
    assert_eq!(results[1]["png"], "cG5n");
    assert_eq!(results[1]["json"], json!({"a": 1}));
}

#[test]
fn cell_result_without_number_is_null() {
    let Some(agent) = agent() else { return };
    let code =
        "class Table:\n    def _repr_json_(self): return {'a': [1.5, float('nan')]}\nTable()";
    let events = run(&agent, code);
    assert_eq!(of_kind(&events, "result")[0]["json"], json!({"a": [1.5, null]}));
}

#[test]
fn cell_environment_is_of_the_cell_alone() {
    let Some(agent) = agent() else { return };
    let body = json!({"code": "import os; os.environ.get('V')", "env_vars": {"V": "w"}});
    assert_eq!(text(&execute(&agent, body), "result"), "w");
    assert_eq!(text(&run(&agent, "os.environ.get('V')"), "result"), "");
}

#[test]
fn kernel_that_dies_is_told_of_and_replaced() {
    let Some(agent) = agent() else { return };
    run(&agent, "x = 1");
    let events = run(&agent, "import os; os._exit(1)");
    assert_eq!(of_kind(&events, "error")[0]["name"], "KernelDied");
    assert_eq!(events.last().unwrap()["type"], "unexpected_end_of_execution");
    assert_eq!(text(&run(&agent, "'x' in globals()"), "result"), "False");
}

#[test]
fn client_gone_interrupts_the_cell() {
    let Some(agent) = agent() else { return };
    run(&agent, "x = 5");
    let mut stream = open(&agent, &json!({"code": "import time\nprint(1)\ntime.sleep(60)"}));
    stream.read_line(&mut String::new()).unwrap();
    stream.get_ref().close();
    let begun = Instant::now();
    assert_eq!(text(&run(&agent, "x"), "result"), "5");
    assert!(begun.elapsed() < Duration::from_secs(20));
}

#[test]
fn contexts_are_apart() {
    let Some(agent) = agent() else { return };
    let call = |method: &str, target: &str, body: Value| {
        let body = body.to_string();
        let mut reader = agent.open("interpreter", method, target, &[], body.as_bytes());
        let mut line = String::new();
        reader.read_line(&mut line).unwrap();
        let mut rest = String::new();
        std::io::Read::read_to_string(&mut reader, &mut rest).unwrap();
        let status: u16 = line.split(' ').nth(1).unwrap().parse().unwrap();
        let body = rest.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned();
        (status, serde_json::from_str::<Value>(&body).unwrap_or_default())
    };
    let (status, context) = call("POST", "/contexts", json!({"cwd": "/usr", "language": "python"}));
    assert_eq!((status, &context["cwd"]), (200, &json!("/usr")));
    let id = context["id"].as_str().unwrap();
    run(&agent, "only_default = 1");
    let body =
        json!({"code": "import os; (os.getcwd(), 'only_default' in globals())", "context_id": id});
    assert_eq!(text(&execute(&agent, body.clone()), "result"), "('/usr', False)");
    assert_eq!(call("GET", "/contexts", json!({})).1.as_array().unwrap().len(), 2);
    assert_eq!(call("POST", &format!("/contexts/{id}/restart"), json!({})).0, 204);
    assert_eq!(call("DELETE", &format!("/contexts/{id}"), json!({})).0, 204);
    assert_eq!(call("POST", "/execute", body.clone()).0, 404);
    assert_eq!(call("POST", "/contexts", json!({"cwd": "/no/such"})).0, 400);
    assert_eq!(call("POST", "/execute", json!({"code": "1", "language": "cobol"})).0, 400);
    let both = json!({"code": "1", "language": "python", "context_id": id});
    assert_eq!(call("POST", "/execute", both).0, 400);
}

#[test]
fn bash_keeps_variables_and_tells_the_status() {
    let Some(agent) = agent() else { return };
    let bash = |code: &str| execute(&agent, json!({"code": code, "language": "bash"}));
    assert_eq!(text(&bash("X=5; cd /usr; echo $X"), "stdout"), "5\n");
    let events = bash("echo $X $PWD; false");
    assert_eq!(text(&events, "stdout"), "5 /usr\n");
    assert_eq!(of_kind(&events, "error")[0]["value"], "1");
}

#[test]
fn new_identity_reseeds_the_warm_kernel() {
    let Some(agent) = agent() else { return };
    let init = |sandbox: &str| {
        let message = json!({"identity": {"sandboxId": sandbox, "seed": "00"}}).to_string();
        assert_eq!(agent.request("POST", "/init", &[], message.as_bytes()).status, 204);
    };
    run(&agent, "import random; random.setstate(random.getstate()); state = random.getstate()");
    init("one");
    assert_eq!(text(&run(&agent, "random.getstate() == state"), "result"), "False");
    let code = "import os; state = random.getstate(); os.environ['WARREN_SANDBOX_ID']";
    assert_eq!(text(&run(&agent, code), "result"), "one");
    // The same sandbox after a pause goes on with its numbers.
    init("one");
    assert_eq!(text(&run(&agent, "random.getstate() == state"), "result"), "True");
    // A program that chose its seed keeps it in a fork too.
    run(&agent, "random.seed(42); state = random.getstate()");
    init("two");
    assert_eq!(text(&run(&agent, "random.getstate() == state"), "result"), "True");
}

#[test]
fn language_whose_program_is_missing_names_the_program() {
    let Some(agent) = agent() else { return };
    let message = json!({"defaultUser": user_name(), "envVars": {"PATH": "/nonexistent"}});
    assert_eq!(agent.request("POST", "/init", &[], message.to_string().as_bytes()).status, 204);
    let events = execute(&agent, json!({"code": "1", "language": "javascript"}));
    let value = of_kind(&events, "error")[0]["value"].as_str().unwrap();
    assert!(value.contains("this sandbox has no node"), "{value}");
}

#[test]
fn child_that_a_cell_forks_serves_no_cells() {
    let Some(agent) = agent() else { return };
    // It ends with the cell, or by itself, or in a way that a cell would tell of.
    run(&agent, "import os, sys\nv = 'x'\np = os.fork()");
    for number in 0..3 {
        let code = format!("print({number}, p > 0, v); v = 'v{number}'; {number}");
        let events = run(&agent, &code);
        let before = if number == 0 { "x".to_owned() } else { format!("v{}", number - 1) };
        assert_eq!(text(&events, "stdout"), format!("{number} True {before}\n"));
        assert_eq!(text(&events, "result"), number.to_string());
    }
    let code = "p = os.fork()\nif p == 0: sys.exit(3)\nos.waitpid(p, 0)\n'parent'";
    let events = run(&agent, code);
    assert_eq!(text(&events, "result"), "parent");
    assert!(of_kind(&events, "error").is_empty());
    assert_eq!(text(&run(&agent, "40 + 2"), "result"), "42");
}

#[test]
fn what_a_cell_writes_to_every_descriptor_disturbs_nobody() {
    let Some(agent) = agent() else { return };
    for stray in
        [r#"{"type":"end_of_execution"}"#, r#"{"type":"end_of_execution","cell":9}"#, "garbage"]
    {
        let code = format!(
            "import os\nfor i in range(3, 20):\n  try: os.write(i, b'{stray}\\n')\n  except OSError: pass\n'own'"
        );
        assert_eq!(text(&run(&agent, &code), "result"), "own");
        assert_eq!(text(&run(&agent, "1 + 1"), "result"), "2");
    }
}
