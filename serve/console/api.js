// What the console says to the endpoint, reads from files and puts into words. Nothing here touches the page.

const TOKEN_KEY = "malmen-token";

/** An answer that is an error; `document` is RFC 9457 problem details. `status` is 0 where nothing answered. */
export class Problem extends Error {
  constructor(document) {
    super(document.detail || document.title || `the endpoint answered with status ${document.status}`);
    this.status = document.status;
    this.document = document;
  }
}

export const token = {
  get: () => sessionStorage.getItem(TOKEN_KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(TOKEN_KEY, value) : sessionStorage.removeItem(TOKEN_KEY)),
};

/** Keep a `#token=…` of the address and take it out of sight; says whether there was one. */
export function takeTokenFromAddress() {
  const found = /^#token=(.+)$/.exec(location.hash);
  if (!found) return false;
  token.set(decodeURIComponent(found[1].replace(/%(?![0-9a-f]{2})/gi, "%25")).trim());
  history.replaceState(null, "", location.pathname + location.search);
  return true;
}

export async function call(method, path, { body, headers = {}, timeout = 600_000 } = {}) {
  const secret = token.get();
  if (!/^[\x21-\x7e]+$/.test(secret)) {
    const detail = secret ? "The token holds characters that no token has." : "Type a token first.";
    throw new Problem({ status: 401, detail });
  }
  const sent = { Authorization: `Bearer ${secret}`, Accept: "application/json", ...headers };
  if (body !== undefined) sent["Content-Type"] = "application/json";
  const options = { method, headers: sent, body: body && JSON.stringify(body), cache: "no-store" };
  try {
    const response = await fetch(path, { ...options, signal: AbortSignal.timeout(timeout) });
    return readAnswer(response, await response.text());
  } catch (error) {
    if (error instanceof Problem) throw error;
    const late = error.name === "TimeoutError";
    throw new Problem({ status: 0, detail: `The endpoint ${late ? "did not answer in time" : "does not answer"}.` });
  }
}

function readAnswer(response, text) {
  let value = null;
  try {
    value = JSON.parse(text);
  } catch {
    if (response.ok) throw new Problem({ status: 0, detail: "The endpoint answered with something that is not JSON." });
  }
  if (response.ok) return value;
  const wait = response.headers.get("Retry-After");
  throw new Problem({ ...(wait && { retry_after: wait }), ...value, status: response.status });
}

/** The reply to a change, also where it runs as a job; `onProgress` is told the job each second. */
export async function finished(reply, onProgress) {
  const id = reply.job ?? (reply.state && reply.id);
  if (!id) return reply;
  for (let silent = 0; ; ) {
    await new Promise((wake) => setTimeout(wake, 1000));
    try {
      const job = await call("GET", `/v1/jobs/${encodeURIComponent(id)}`, { timeout: 30_000 });
      silent = 0;
      onProgress(job);
      if (job.state === "done") return job.result;
      if (job.state === "failed") throw failure(job);
    } catch (problem) {
      // The job goes on without us: a proxy that restarts, or a limit of calls, is no reason to lose sight of it.
      if (![0, 429, 502, 503, 504].includes(problem.status) || problem.ofJob || ++silent > 60) throw problem;
    }
  }
}

function failure(job) {
  const given = typeof job.problem === "string" ? { detail: job.problem } : job.problem;
  return Object.assign(new Problem({ status: 422, detail: "The job failed.", ...given }), { ofJob: true });
}

const keys = new Map();

/** Ask for a change of the facts. The same change keeps its Idempotency-Key until it is answered, so that sending it
 * again after silence does nothing twice. */
export async function sendChange(change, onProgress) {
  const body = JSON.stringify(change);
  if (!keys.has(body)) keys.set(body, uuid());
  try {
    const headers = { "Idempotency-Key": keys.get(body) };
    const reply = await finished(await call("POST", "/v1/edits", { body: change, headers }), onProgress);
    keys.delete(body);
    return reply;
  } catch (problem) {
    if (problem.status > 0 && problem.status < 500) keys.delete(body);
    throw problem;
  }
}

export async function complete(model, prompt, maxTokens) {
  const body = { model, prompt, max_tokens: maxTokens, temperature: 0 };
  const reply = await call("POST", "/v1/completions", { body });
  return { text: reply.choices[0].text, model: reply.model };
}

/** Do `work` for every item, a few at a time. */
export async function forEach(items, atOnce, work) {
  const rest = items.entries();
  const worker = async () => {
    for (const [index, item] of rest) await work(item, index);
  };
  await Promise.all(Array.from({ length: atOnce }, worker));
}

function uuid() {
  if (crypto.randomUUID) return crypto.randomUUID(); // only there on https and localhost
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  bytes[6] = (bytes[6] & 0x0f) | 0x40;
  bytes[8] = (bytes[8] & 0x3f) | 0x80;
  const hex = Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
  return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
}

// --- files and pasted lines: each reader gives {facts: [{prompt, answer}], errors: ["line 3: …"]} ---

export function readFile(name, text) {
  const kind = name.toLowerCase().split(".").pop();
  const reader = { jsonl: readJsonLines, json: readJson, csv: readCsv }[kind];
  return reader ? reader(text) : { facts: [], errors: [`${name}: the name should end in .jsonl, .json or .csv`] };
}

/** Lines of `prompt TAB answer` or `prompt => answer`. */
export function readLines(text) {
  return collect(numbered(text).map(([number, line]) => [`line ${number}`, () => readLine(line)]));
}

export const looksLikeFacts = (text) => /\t|=>/.test(text.trim());

function readLine(line) {
  const parts = line.split(line.includes("\t") ? "\t" : "=>");
  if (parts.length === 2) return { prompt: parts[0].trim(), answer: parts[1].trim() };
  const found = parts.length === 1 ? "neither tab nor =>" : `${parts.length} parts`;
  throw new Error(`expected a prompt, one tab (or one =>) and an answer; found ${found}`);
}

function readJsonLines(text) {
  return collect(numbered(text).map(([number, line]) => [`line ${number}`, () => JSON.parse(line)]));
}

function readJson(text) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    return { facts: [], errors: [`this is not JSON: ${error.message}`] };
  }
  const rows = Array.isArray(value) ? value : value?.facts;
  if (!Array.isArray(rows)) return { facts: [], errors: ["expected a list of objects with prompt and answer"] };
  return collect(rows.map((row, index) => [`entry ${index + 1}`, () => row]));
}

function readCsv(text) {
  const separator = [",", ";", "\t"].find((one) => text.split(/\r?\n/, 1)[0].includes(one)) ?? ",";
  const { rows, open } = csvRows(text, separator);
  if (open) return { facts: [], errors: [`line ${open}: a quotation mark is opened here and never closed`] };
  const names = (rows.shift()?.cells ?? []).map((name) => name.trim().toLowerCase());
  const [prompt, answer] = [names.indexOf("prompt"), names.indexOf("answer")];
  if (prompt < 0 || answer < 0) {
    const found = names.join(", ") || "nothing";
    return { facts: [], errors: [`line 1: expected the columns prompt and answer; found ${found}`] };
  }
  const read = (cells) => {
    if (cells.length === names.length) return { prompt: cells[prompt], answer: cells[answer] };
    throw new Error(`${cells.length} columns, but the first line has ${names.length}`);
  };
  return collect(rows.map(({ line, cells }) => [`line ${line}`, () => read(cells)]));
}

/** RFC 4180: quoted cells may hold separators, line ends and doubled quotation marks. */
function csvRows(text, separator) {
  const rows = [];
  let row = { line: 1, cells: [""] }, line = 1, open = 0;
  const close = () => {
    if (row.cells.length > 1 || row.cells[0].trim()) rows.push(row);
    row = { line, cells: [""] };
  };
  for (let at = 0; at < text.length; at++) {
    const sign = text[at], last = row.cells.length - 1;
    if (sign === "\n") line++;
    if (open && sign === '"' && text[at + 1] === '"') row.cells[last] += text[at++];
    else if (sign === '"' && (open || !row.cells[last])) open = open ? 0 : line;
    else if (open) row.cells[last] += sign;
    else if (sign === separator) row.cells.push("");
    else if (sign === "\n") close();
    else if (sign !== "\r") row.cells[last] += sign;
  }
  close();
  return { rows, open };
}

function numbered(text) {
  return text.split(/\r?\n/).map((line, index) => [index + 1, line]).filter(([, line]) => line.trim());
}

function collect(readers) {
  const facts = [], errors = [];
  for (const [where, read] of readers) {
    try {
      facts.push(checked(read()));
    } catch (error) {
      errors.push(`${where}: ${error.message}`);
    }
  }
  if (!facts.length && !errors.length) errors.push("there is no fact in it");
  return { facts, errors };
}

function checked(row) {
  if (row === null || typeof row !== "object") throw new Error("expected an object with prompt and answer");
  for (const name of ["prompt", "answer"]) {
    const value = row[name] ?? null;
    if (value === null) throw new Error(`the ${name} is missing`);
    if (typeof value !== "string") throw new Error(`the ${name} should be text in quotation marks, not ${value}`);
    if (!value.trim()) throw new Error(`the ${name} is empty`);
  }
  return { prompt: row.prompt, answer: row.answer };
}

/** Where two texts part: [what both begin with, what only each has, what both end with], cut between words. */
export function compare(before, after) {
  const [left, right] = [before, after].map((text) => text.match(/\s*\S+|\s+$/g) ?? []);
  const most = Math.min(left.length, right.length);
  let start = 0, end = 0;
  while (start < most && left[start] === right[start]) start++;
  while (end < most - start && left.at(-1 - end) === right.at(-1 - end)) end++;
  return [left, right].map((words) => {
    const cuts = [0, start, words.length - end, words.length];
    return [0, 1, 2].map((part) => words.slice(cuts[part], cuts[part + 1]).join(""));
  });
}

// --- words ---

export const percent = (share) => `${Number((share * 100).toPrecision(2))} %`;
export const facts = (number) => `${number} ${number === 1 ? "fact" : "facts"}`;
export const quoted = (text) => `“${text.length > 80 ? `${text.slice(0, 80)}…` : text}”`;

/** Whether a fact holds; `would` where nothing was published. */
export function holding(fact, would = false) {
  const verb = would ? `would ${fact.holds ? "" : "not "}hold` : fact.holds ? "holds" : "does not hold";
  const part = `${verb}: ${fact.tokens_right} of ${fact.tokens} tokens right`;
  return fact.holds || fact.tokens === undefined ? verb : part;
}

/** The guard's numbers as sentences. */
export function guardWords({ max_shift_ratio: shift, perplexity_ratio: ratio }) {
  const change = Number.isFinite(shift) ? percent(shift) : "an unmeasurable multiple";
  return [`At most, a layer's weights change by ${change} of their size.`, perplexityWords(ratio)];
}

function perplexityWords(ratio) {
  if (!Number.isFinite(ratio)) return "Unrelated answers were not measured: the endpoint has no probes of its own.";
  const off = Math.abs(ratio - 1), way = ratio > 1 ? "less" : "more";
  const sure = off < 0.0005 ? "as sure as before" : `${percent(off)} ${way} sure than before`;
  return `On the endpoint's own unrelated probes, the model is ${sure} (perplexity × ${ratio.toFixed(3)}).`;
}

/** The same, short enough for a cell. */
export function guardNumbers({ max_shift_ratio: shift, perplexity_ratio: ratio } = {}) {
  const change = Number.isFinite(shift) ? [`weights change by ${percent(shift)} at most`] : [];
  return [...change, ...(Number.isFinite(ratio) ? [`perplexity × ${ratio.toFixed(3)}`] : [])].join(", ") || "–";
}
