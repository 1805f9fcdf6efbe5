// ---- elements, numbers and packed data ----

// Every text on the page goes through here, as a text node.
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(2).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

const byId = (id) => document.getElementById(id);

// Control characters and marks that turn the direction of text are shown, never obeyed.
const UNSEEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb]/g;
const seen = (text) =>
  String(text).replace(UNSEEN, (character) => {
    const code = character.charCodeAt(0);
    if (code < 0x20) return String.fromCharCode(0x2400 + code);
    return `<U+${code.toString(16).toUpperCase().padStart(4, "0")}>`;
  });

const known = (value) => value !== null && value !== undefined && Number.isFinite(value);
const MINUS = "\u2212";

function number(value, digits = 3) {
  if (!known(value)) return "none";
  const size = Math.abs(value);
  let text;
  if (size !== 0 && (size < 0.001 || size >= 1e7)) text = value.toExponential(1);
  else if (size >= 1000) text = Math.round(value).toLocaleString("en-US");
  else text = value.toFixed(size >= 100 ? 0 : size >= 10 ? Math.min(1, digits) : digits);
  return text.replace("-", MINUS);
}

const FORMS = {
  number: (value) => number(value),
  share: (value) => (known(value) ? `${(100 * value).toFixed(value !== 0 && Math.abs(value) < 0.1 ? 1 : 0)} %` : "none"),
  seconds: (value) => (known(value) ? `${number(value, 2)} s` : "none"),
};

function duration(seconds) {
  if (!known(seconds)) return "";
  const total = Math.round(seconds);
  const hours = Math.floor(total / 3600), minutes = Math.floor((total % 3600) / 60), rest = total % 60;
  return hours ? `${hours} h ${minutes} min` : minutes ? `${minutes} min ${rest} s` : `${rest} s`;
}

async function inflate(base64) {
  const binary = atob(base64);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(stream).text();
}

// A list that makes its elements as they come into sight: `count` items, `make(i)` an element.
function fill(list, count, make, chunk = 24) {
  const end = el("div", { class: "more" });
  let made = 0;
  const more = () => {
    const nodes = [];
    for (const last = Math.min(made + chunk, count); made < last; made++) nodes.push(make(made));
    end.before(...nodes);
    if (made >= count) watcher.disconnect();
  };
  const watcher = new IntersectionObserver((entries) => entries.some((e) => e.isIntersecting) && more(), { rootMargin: "900px" });
  list.replaceChildren(end);
  more();
  watcher.observe(end);
}
