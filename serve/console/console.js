// The console's page. Prompts and answers are foreign text: everything is inserted as text nodes, nothing as HTML.
import {
  Problem, call, compare, complete, facts, finished, forEach, guardNumbers, guardWords, holding, looksLikeFacts, quoted,
  readFile, readLines, sendChange, takeTokenFromAddress, token,
} from "./api.js";

const POLL_MS = 3000, PAGE = 50, ROWS_SHOWN = 100, LINES_LISTED = 20, PROBES_AT_ONCE = 4, PROBE_TOKENS = 24;
const PROBES_KEY = "malmen-probes";
const FIRST_PROBES = ["The capital of France is", "The opposite of hot is", "Hamlet was written by"];
const RANKS = { read: 1, edit: 2, admin: 3 };
const MAY = { read: "may ask", edit: "may ask and change facts", admin: "may also choose what is live" };

const emptyRow = () => ({ prompt: "", answer: "", result: null });
const drafts = { rows: [emptyRow()], first: 0 };
const edits = { rows: [], next: null, turn: 0 };
const versions = { rows: [], next: null, turn: 0, live: null };
let status = null; // the endpoint's last word
let listed = null; // the live version for which the lists were loaded
let silentSince = null, timer = 0;

// --- small tools ---

const $ = (id) => document.getElementById(id);
const tbody = (table) => $(table).tBodies[0];
const say = (id, ...content) => $(id).replaceChildren(...content);
const sayVerdict = (id, good, text, ...more) => say(id, el("p", {}, verdict(good, text)), ...more);
const paragraphs = (lines) => lines.map((line) => el("p", {}, line));
const quiet = (text) => el("span", { className: "hint" }, text);
const verdict = (good, text) => el("span", { className: good ? "good" : "bad" }, `${good ? "✓" : "✗"} ${text}`);

function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (name in node) node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

/** A row of [column, ...content] cells; the column's name is shown in the cell on narrow screens. */
function tableRow(cells, props = {}) {
  const made = cells.map(([label, ...content]) => el("td", { role: "cell", "data-label": label }, ...content));
  return el("tr", { role: "row", ...props }, ...made);
}

function whoAndWhen({ actor, at }) {
  return [actor, el("br"), el("time", { dateTime: at, className: "hint" }, new Date(at).toLocaleString("en-GB"))];
}

function bullets(lines) {
  const shown = lines.slice(0, LINES_LISTED);
  if (lines.length > shown.length) shown.push(`and ${lines.length - shown.length} more`);
  return shown.length ? [el("ul", {}, ...shown.map((line) => el("li", {}, line)))] : [];
}

/** Do something, once at a time per button; what goes wrong is shown in `place`. */
async function once(button, place, work, sent) {
  if (button.ariaBusy === "true") return;
  button.ariaBusy = "true";
  await attempt(place, work, sent);
  button.ariaBusy = "false";
}

async function attempt(place, work, sent) {
  try {
    await work();
  } catch (problem) {
    showProblem($(place), problem, sent);
  }
}

/** A problem in the page, and at the rows that were sent. */
function showProblem(place, problem, sent = []) {
  if (!(problem instanceof Problem)) console.error(problem);
  const { reasons = [], facts: rows = [], retry_after: wait, guard } = problem.document ?? {};
  const words = (row) => row.detail ?? holding(row, true);
  const wrong = rows.filter((row) => row.detail || !row.holds).map((row) => {
    return `Row ${(sent[row.index]?.row ?? row.index) + 1}, ${quoted(row.prompt ?? "")}: ${words(row)}`;
  });
  const untold = reasons.filter((reason) => !problem.message.includes(reason));
  const head = el("p", {}, verdict(false, problem.message), wait ? ` Try again in ${wait} s.` : "");
  place.replaceChildren(head, ...bullets([...untold, ...wrong]), ...paragraphs(guard ? guardWords(guard) : []));
  for (const row of rows) setResult(sent[row.index], !row.detail && row.holds, words(row));
}

function onEnter(node, action) {
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return; // Shift+Enter makes a new line
    event.preventDefault();
    action();
  });
}

function applyRole(root = document) {
  for (const button of root.querySelectorAll("[data-needs]")) {
    const { needs } = button.dataset;
    button.disabled = !(RANKS[status?.role] >= RANKS[needs]);
    const why = status ? `This needs the role ${needs}; your token has ${status.role}.` : "Type a valid token first.";
    button.title = button.disabled ? why : "";
  }
}

/** Ask in the page whether it is meant, in the place of the button that was pressed. */
function confirmStep(button, question, yes, act) {
  const close = () => {
    group.replaceWith(button);
    button.focus();
  };
  const id = button.dataset.remove ?? button.dataset.live;
  const go = el("button", { type: "button", className: "main", "data-confirm": id }, yes);
  const stay = el("button", { type: "button", onclick: close }, "Cancel");
  const group = el("span", { role: "group", "aria-label": question, className: "line" }, question, go, stay);
  go.onclick = () => (close(), act());
  group.onkeydown = (event) => event.key === "Escape" && close();
  button.replaceWith(group);
  stay.focus(); // not the other: a key held down must not confirm
}

// --- facts ---

function renderDrafts() {
  const last = Math.floor((drafts.rows.length - 1) / ROWS_SHOWN) * ROWS_SHOWN;
  drafts.first = Math.max(0, Math.min(drafts.first, last));
  const shown = drafts.rows.slice(drafts.first, drafts.first + ROWS_SHOWN);
  tbody("facts-table").replaceChildren(...shown.map((draft, place) => draftRow(draft, drafts.first + place)));
  $("facts-pager").hidden = last === 0;
  $("facts-back").disabled = drafts.first === 0;
  $("facts-on").disabled = drafts.first === last;
  say("facts-range", `Rows ${drafts.first + 1} to ${drafts.first + shown.length} of ${drafts.rows.length}`);
  renderResults();
}

function draftRow(draft, index) {
  const [prompt, answer] = ["prompt", "answer"].map((name) => draftField(draft, index, name));
  onEnter(prompt, () => answer.focus());
  onEnter(answer, () => (index + 1 < drafts.rows.length ? focusRow(index + 1) : addRow()));
  const remove = el("button", { type: "button", "aria-label": `Delete row ${index + 1}` }, "Delete");
  remove.onclick = () => deleteRow(index);
  const row = tableRow([["Row", `${index + 1}`], ["Prompt", prompt], ["Answer", answer], ["Result"], ["", remove]]);
  row.cells[3].classList.add("fact-result");
  return row;
}

function draftField(draft, index, name) {
  const label = `${name === "prompt" ? "Prompt" : "Answer"} of row ${index + 1}`;
  const field = el("textarea", { className: `fact-${name}`, rows: 1, value: draft[name], "aria-label": label });
  field.oninput = () => {
    draft[name] = field.value;
    draft.result = null; // it was about the text before
    renderResults();
  };
  field.onpaste = (event) => {
    const text = event.clipboardData.getData("text");
    if (!looksLikeFacts(text)) return;
    event.preventDefault();
    addFacts("What was pasted", readLines(text), index);
  };
  return field;
}

function renderResults() {
  [...tbody("facts-table").rows].forEach((row, place) => {
    const result = drafts.rows[drafts.first + place]?.result;
    row.cells[3].replaceChildren(...(result ? [verdict(result.good, result.text)] : []));
  });
}

function setResult(sent, good, text) {
  if (!sent || sent.draft.prompt !== sent.prompt || sent.draft.answer !== sent.answer) return; // edited meanwhile
  sent.draft.result = { good, text };
}

function focusRow(index) {
  if (index < drafts.first || index >= drafts.first + ROWS_SHOWN) {
    drafts.first = Math.floor(index / ROWS_SHOWN) * ROWS_SHOWN;
    renderDrafts();
  }
  tbody("facts-table").rows[index - drafts.first].querySelector(".fact-prompt").focus();
}

/** Replace the rows; there is always one to type in. */
function setRows(rows, focus = null) {
  drafts.rows = rows.length ? rows : [emptyRow()];
  renderDrafts();
  if (focus !== null) focusRow(Math.min(focus, drafts.rows.length - 1));
}

const addRow = () => setRows([...drafts.rows, emptyRow()], drafts.rows.length);
const deleteRow = (index) => setRows(drafts.rows.toSpliced(index, 1), index);
const isEmpty = (row) => !row.prompt.trim() && !row.answer.trim();
const mostFacts = () => status?.limits?.facts_per_call ?? Infinity;

/** Put what was read after row `after`: all of it or nothing. */
function addFacts(source, { facts: read, errors }, after = drafts.rows.length - 1) {
  const before = drafts.rows.slice(0, after + 1).filter((row) => !isEmpty(row));
  const behind = drafts.rows.slice(after + 1).filter((row) => !isEmpty(row));
  const rows = [...before, ...read.map((fact) => ({ ...fact, result: null })), ...behind];
  const tooMany = `there would be ${facts(rows.length)} in the table; one call takes at most ${mostFacts()}`;
  const wrong = rows.length > mostFacts() ? [tooMany, ...errors] : errors;
  if (wrong.length) {
    sayVerdict("input-result", false, `${source} was not added:`, ...bullets(wrong));
    return false;
  }
  setRows(rows);
  sayVerdict("input-result", true, `${facts(read.length)} added.`);
  return true;
}

async function loadFile() {
  const [file] = $("file").files;
  if (!file) return;
  let read;
  try {
    read = readFile(file.name, new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer()));
  } catch (error) {
    read = { facts: [], errors: [error instanceof TypeError ? "it is not UTF-8 text" : error.message] };
  }
  addFacts(file.name, read);
  $("file").value = ""; // so that the same file can be chosen again once it is mended
}

/** The rows to send, each with its draft and its place in the table; null where something is missing. */
function rowsToSend() {
  const all = drafts.rows.map((draft, row) => ({ draft, row, prompt: draft.prompt, answer: draft.answer }));
  const filled = all.filter((row) => !isEmpty(row));
  const half = filled.filter(({ prompt, answer }) => !prompt.trim() || !answer.trim());
  for (const row of half) setResult(row, false, `the ${row.prompt.trim() ? "answer" : "prompt"} is missing`);
  renderResults();
  const wrong = [
    !filled.length && "Type a fact first.",
    half.length && `Row ${half[0].row + 1} is half empty.`,
    filled.length > mostFacts() && `One call takes at most ${facts(mostFacts())}; these are ${filled.length}.`,
  ].find(Boolean);
  if (wrong) sayVerdict("publish-result", false, wrong);
  return wrong ? null : filled;
}

/** The dry run and the publication share a button's business, so that they do not cross. */
async function publish(dryRun) {
  const sent = $("publish").ariaBusy === "true" ? null : rowsToSend();
  if (!sent) return;
  const change = { facts: sent.map(({ prompt, answer }) => ({ prompt, answer })), remove: [], dry_run: dryRun };
  say("publish-result", dryRun ? "Computing…" : "Publishing…");
  await once($("publish"), "publish-result", async () => showReply(await sendChange(change, showJob), sent), sent);
  $("job").hidden = true;
  renderResults();
  if (!dryRun) reload();
}

function showJob({ state, done = 0, total = 0 }) {
  Object.assign($("job-progress"), { max: total || 1, value: done });
  $("job").hidden = false;
  say("job-text", state === "queued" ? "Waiting for the writer…" : `${done} of ${facts(total)} computed`);
}

function showReply(reply, sent) {
  const held = reply.edits.filter((edit) => edit.holds).length;
  const verb = reply.dry_run ? "would hold" : reply.edits.length === 1 ? "holds" : "hold";
  const share = `${held} of ${facts(reply.edits.length)} ${verb}`;
  const changed = reply.removed.length || reply.edits.some((edit) => edit.status !== "unchanged");
  const published = `Published as version ${reply.number} (${reply.version}): ${share}; ${reply.num_facts} in all.`;
  const kept = changed ? published : "Nothing changed: all of this was there already.";
  const text = reply.dry_run ? `Dry run, nothing was published: ${share}.` : kept;
  sayVerdict("publish-result", true, text, ...paragraphs(guardWords(reply.guard)));
  for (const edit of reply.edits) setResult(sent[edit.index], edit.holds, editWords(edit, reply.dry_run));
}

function editWords(edit, dryRun) {
  if (edit.status === "unchanged") return `${holding(edit)}; was there already`;
  if (!edit.supersedes) return holding(edit, dryRun);
  const old = edits.rows.find(({ id }) => id === edit.supersedes);
  const what = old ? `the answer ${quoted(old.answer)} (${old.id})` : edit.supersedes;
  return `${holding(edit, dryRun)}; supersedes ${what}`;
}

// --- ask, and probes ---

const tokensAtMost = (wanted) => Math.max(1, Math.min(wanted || PROBE_TOKENS, status?.limits?.max_tokens ?? 256));
const marked = ([start, own, end]) => [start, ...(own ? [el("mark", {}, own)] : []), end];

async function ask() {
  const prompt = $("ask-prompt").value, version = $("ask-version").value;
  if (!prompt.trim()) return say("ask-result", "Type a prompt first.");
  const wanted = tokensAtMost(Math.round(Number($("ask-tokens").value)));
  const places = ["answer-before", "answer-after"];
  places.forEach((place) => say(place));
  say("ask-result", "Asking…");
  const answers = await Promise.allSettled(["base", version].map((model) => complete(model, prompt, wanted)));
  const texts = answers.map(({ value }) => value?.text ?? "");
  const both = answers.every(({ value }) => value);
  const parts = both ? compare(...texts) : texts.map((text) => [text, "", ""]);
  answers.forEach(({ reason }, side) => {
    if (reason) showProblem($(places[side]), reason);
    else say(places[side], ...marked(parts[side]));
  });
  const answered = answers[1].value?.model ?? version;
  say("after-version", answered === version ? version : `${version} (${answered})`);
  const differ = texts[0] === texts[1] ? "Both answer the same." : "The answers differ; the differing part is marked.";
  say("ask-result", both ? differ : "Not both could be asked.");
}

async function runProbes() {
  const prompts = [...new Set($("probes").value.split("\n").filter((line) => line.trim()))];
  if (!prompts.length) return say("probes-summary", "Type a prompt first.");
  const live = status?.live?.version ?? "live"; // one version for all, even if `live` moves meanwhile
  const rows = [], bar = Object.assign($("probes-progress"), { max: prompts.length, value: 0, hidden: false });
  say("probes-summary", "Asking…");
  await forEach(prompts, PROBES_AT_ONCE, async (prompt, index) => {
    try {
      const asked = ["base", live].map((model) => complete(model, prompt, tokensAtMost(PROBE_TOKENS)));
      const [before, after] = (await Promise.all(asked)).map(({ text }) => text);
      rows[index] = { prompt, before, after, same: before === after };
    } catch (problem) {
      rows[index] = { prompt, problem };
    }
    bar.value++;
  });
  bar.hidden = true;
  showProbes(rows);
}

function showProbes(rows) {
  const asked = rows.filter((row) => !row.problem), same = asked.filter((row) => row.same).length;
  const share = `${same} of ${asked.length} answers stayed the same (${Math.round((100 * same) / asked.length)} %).`;
  const failed = asked.length < rows.length ? [`${rows.length - asked.length} could not be asked.`] : [];
  const text = asked.length ? share : "No probe was answered.";
  sayVerdict("probes-summary", same === rows.length, text, ...paragraphs(failed));
  $("probes-table").hidden = false;
  tbody("probes-table").replaceChildren(...rows.map(probeRow));
}

function probeRow({ prompt, before = "–", after = "–", same, problem }) {
  const [left, right] = compare(before, after).map(marked);
  const result = problem ? verdict(false, problem.message) : verdict(same, same ? "same" : "drifted");
  return tableRow([["Prompt", prompt], ["Unedited", ...left], ["Live", ...right], ["Result", result]]);
}

// --- corrections ---

/** Load the first page of a list, or the next one; false where a newer call has overtaken it. */
async function loadPage(list, path, query, more) {
  const turn = ++list.turn;
  const search = new URLSearchParams({ limit: PAGE, ...query, ...(more && { before: list.next }) });
  const page = await call("GET", `/v1/${path}?${search}`);
  if (turn !== list.turn) return false;
  list.rows = more ? [...list.rows, ...page[path]] : page[path];
  list.next = page.next ?? null;
  $(`${path}-more`).hidden = list.next === null;
  return true;
}

async function loadEdits(more = false) {
  if (await loadPage(edits, "edits", { state: $("edits-all").checked ? "all" : "live" }, more)) renderEdits();
}

function renderEdits() {
  const wanted = $("edits-filter").value.trim().toLowerCase();
  const text = (edit) => [edit.prompt, edit.answer, edit.id, edit.actor].join("\n").toLowerCase();
  const shown = edits.rows.filter((edit) => text(edit).includes(wanted));
  tbody("edits-table").replaceChildren(...shown.map(editRow));
  const rest = edits.next === null ? "" : " There are more to load.";
  say("edits-count", `${shown.length} of ${edits.rows.length} loaded are shown.${rest}`);
  applyRole($("edits-table"));
}

function editRow(edit) {
  return tableRow([
    ["Prompt", edit.prompt],
    ["Answer", edit.answer],
    ["State", edit.state.replace("_", " "), el("br"), quiet(edit.id)],
    ["Holds", edit.state === "live" ? verdict(edit.holds, holding(edit)) : "–"],
    ["Who and when", ...whoAndWhen(edit)],
    ["Action", edit.state === "live" ? removeButton(edit) : "–"],
  ]);
}

function removeButton(edit) {
  const label = `Remove the correction of ${quoted(edit.prompt)}`;
  const props = { type: "button", "data-remove": edit.id, "data-needs": "edit", "aria-label": label };
  const button = el("button", props, "Remove");
  const act = () => once(button, "edits-result", () => removeEdit(edit)).then(reload);
  button.onclick = () => confirmStep(button, "Take this correction back?", "Yes, remove", act);
  return button;
}

async function removeEdit(edit) {
  const reply = await finished(await call("DELETE", `/v1/edits/${encodeURIComponent(edit.id)}`), () => {});
  const text = `Removed in version ${reply.number} (${reply.version}); ${facts(reply.num_facts)} left.`;
  sayVerdict("edits-result", true, text, ...paragraphs(guardWords(reply.guard)));
  $("edits-result").focus(); // the row and its button go away
}

// --- versions ---

async function loadVersions(more = false) {
  const [loaded, names] = await Promise.all([loadPage(versions, "versions", {}, more), call("GET", "/v1/aliases")]);
  if (!loaded) return;
  versions.live = names.aliases.find(({ name }) => name === "live") ?? null;
  tbody("versions-table").replaceChildren(...versions.rows.map(versionRow));
  const chosen = $("ask-version").value;
  const choices = [["live", "live"], ...versions.rows.map(({ id, number }) => [id, `${number}: ${id}`])];
  say("ask-version", ...choices.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
  applyRole($("versions-table"));
}

function versionRow(version) {
  const isLive = version.id === versions.live?.version;
  const names = version.aliases.length ? [el("br"), quiet(`named ${version.aliases.join(", ")}`)] : [];
  const label = `What version ${version.number} changed`;
  const more = el("button", { type: "button", "aria-expanded": "false", "aria-label": label }, "What changed");
  more.onclick = () => once(more, "versions-result", () => toggleVersion(more, version));
  const action = isLive ? el("strong", {}, "● live now") : liveButton(version);
  return tableRow([
    ["Number", `${version.number}`],
    ["Version", version.id, ...names],
    ["Facts", `${version.num_facts}`],
    ["Who and when", ...whoAndWhen(version)],
    ["Measured", guardNumbers(version.guard)],
    ["Action", el("span", { className: "line" }, more, action)],
  ], isLive ? { className: "live", "aria-current": "true" } : {});
}

function liveButton(version) {
  const text = version.number < (status?.live.number ?? Infinity) ? "Roll back to this" : "Make live";
  const label = `${text}: version ${version.number}`;
  const props = { type: "button", "data-live": version.id, "data-needs": "admin", "aria-label": label };
  const button = el("button", props, text);
  const question = `Serve version ${version.number} with ${facts(version.num_facts)} from now on?`;
  const act = () => once(button, "versions-result", () => makeLive(version)).then(reload);
  button.onclick = () => confirmStep(button, question, "Yes, make it live", act);
  return button;
}

async function makeLive(version) {
  const headers = { "If-Match": `"${versions.live?.revision}"` };
  await call("PUT", "/v1/aliases/live", { body: { version: version.id }, headers });
  sayVerdict("versions-result", true, `Version ${version.number} (${version.id}) is live now.`);
  $("versions-result").focus();
}

async function toggleVersion(button, version) {
  const row = button.closest("tr"), open = button.ariaExpanded === "true";
  if (open) row.nextElementSibling.remove();
  else row.after(changesRow(await call("GET", `/v1/versions/${encodeURIComponent(version.id)}`)));
  button.ariaExpanded = `${!open}`;
}

function changesRow({ added, ended }) {
  const line = (edit, how) => el("li", {}, `${quoted(edit.prompt)} → ${quoted(edit.answer)} (${how})`);
  const list = (title, lines) => [el("h3", {}, `${title} ${facts(lines.length)}`), el("ul", {}, ...lines)];
  const lists = [
    ...list("Added", added.map((edit) => line(edit, edit.holds ? "held then" : "did not hold then"))),
    ...list("Ended", ended.map((edit) => line(edit, edit.how))),
  ];
  return el("tr", { role: "row" }, el("td", { role: "cell", colSpan: 6 }, ...lists));
}

// --- status ---

/** See what is there now, also in the lists. */
function reload() {
  listed = null;
  poll();
}

async function poll() {
  clearTimeout(timer);
  const used = token.get();
  if (document.hidden || !used) return;
  let refused = false;
  try {
    const fresh = await call("GET", "/v1/status", { timeout: 10_000 });
    if (used === token.get()) showStatus(fresh);
  } catch (problem) {
    refused = problem.status === 401 || problem.status === 403;
    if (used === token.get()) showSilence(problem, refused);
  }
  clearTimeout(timer);
  if (!refused || used !== token.get()) timer = setTimeout(poll, POLL_MS);
}

function showStatus(fresh) {
  const same = JSON.stringify(status) === JSON.stringify(fresh);
  [status, silentSince] = [fresh, null];
  tell("Connected.", "");
  if (!same) renderStatus(fresh);
  if (listed === fresh.live.version || document.querySelector("[data-confirm]")) return; // not under a finger
  listed = fresh.live.version;
  attempt("edits-result", () => loadEdits());
  attempt("versions-result", () => loadVersions());
}

function renderStatus({ live, writer, readers, role, limits, ...rest }) {
  const items = {
    "Live version": `${live.number} (${live.version})`,
    "Facts": live.num_facts,
    "Writer": `${writer.alive ? "ready" : "✗ not there, nothing can be changed now"}; ${writer.waiting} waiting`,
    "Readers": `${readers.running} of ${readers.replicas} running`,
    "Role": `${role}: ${MAY[role] ?? "unknown to this page"}`,
    "Versions in memory": rest.versions_in_memory,
    "Base model": rest.base_model,
    "Editor": rest.editor,
  };
  const pair = ([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, `${value}`));
  say("status-facts", ...Object.entries(items).map(pair));
  $("status-facts").hidden = false;
  $("ask-tokens").max = limits.max_tokens;
  applyRole();
}

function showSilence(problem, refused) {
  if (refused) {
    forgetStatus();
    return tell(`✗ The token is refused: ${problem.message}`, "bad");
  }
  silentSince ??= new Date().toLocaleTimeString("en-GB");
  tell(`✗ ${problem.message} (Since ${silentSince}; asked again every ${POLL_MS / 1000} seconds.)`, "bad");
}

function tell(text, kind) {
  if ($("connection").textContent === text) return; // it is read aloud each time it is set
  $("connection").className = kind;
  say("connection", text);
}

function forgetStatus() {
  status = listed = null;
  $("status-facts").hidden = true;
  applyRole();
}

/** Another token may see other things: nothing that the former one saw stays. */
function useToken(value) {
  const fresh = value.trim();
  if (fresh === token.get() && status) return;
  token.set(fresh);
  forgetStatus();
  for (const [name, list] of Object.entries({ edits, versions })) {
    Object.assign(list, { rows: [], next: null, turn: list.turn + 1 });
    tbody(`${name}-table`).replaceChildren();
    $(`${name}-more`).hidden = true;
  }
  tell(fresh ? "Connecting…" : "Type a token to begin.", "");
  poll();
}

// --- beginning ---

function startToken() {
  const submit = () => useToken($("token").value);
  takeTokenFromAddress();
  $("token").value = token.get();
  $("token").onchange = submit;
  $("token-form").onsubmit = (event) => (event.preventDefault(), submit());
  $("forget").onclick = () => useToken(($("token").value = ""));
  addEventListener("hashchange", () => takeTokenFromAddress() && location.reload());
  document.addEventListener("visibilitychange", poll);
}

function startFacts() {
  const turn = (pages) => ((drafts.first += pages * ROWS_SHOWN), renderDrafts());
  $("add-row").onclick = addRow;
  $("clear-rows").onclick = () => (say("input-result"), say("publish-result"), setRows([], 0));
  $("facts-back").onclick = () => turn(-1);
  $("facts-on").onclick = () => turn(1);
  $("add-lines").onclick = () => addFacts("The text", readLines($("paste").value)) && ($("paste").value = "");
  $("file").onchange = loadFile;
  $("dry-run").onclick = () => publish(true);
  $("publish").onclick = () => publish(false);
  renderDrafts();
}

function startAsking() {
  $("ask-form").onsubmit = (event) => (event.preventDefault(), once($("ask"), "ask-result", ask));
  onEnter($("ask-prompt"), () => $("ask").click());
  $("probes").value = localStorage.getItem(PROBES_KEY) ?? FIRST_PROBES.join("\n");
  $("probes").oninput = () => localStorage.setItem(PROBES_KEY, $("probes").value);
  $("probes-run").onclick = () => once($("probes-run"), "probes-summary", runProbes);
}

function startLists() {
  $("edits-filter").oninput = renderEdits;
  $("edits-all").onchange = () => attempt("edits-result", () => loadEdits());
  for (const [name, load] of Object.entries({ edits: loadEdits, versions: loadVersions })) {
    const [again, more, result] = ["refresh", "more", "result"].map((part) => $(`${name}-${part}`));
    again.onclick = () => once(again, result.id, () => load());
    more.onclick = () => once(more, result.id, () => load(true));
    result.tabIndex = -1;
  }
}

startToken();
startFacts();
startAsking();
startLists();
applyRole();
poll();
